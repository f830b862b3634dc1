import dataclasses

import pytest
import torch
import torch.nn.functional as F

from lowtide.tools.bench.cases import CASES, IGNORE_INDEX, Mode
from lowtide.tools.bench.options import OPTIONS, RANK, WORKSPACE, Option, options

(SMOKE,) = (case for case in CASES if case.smoke and case.device == "cpu")
CASE = dataclasses.replace(SMOKE, tokens=40, features=24, classes=56)
V, D = CASE.classes, CASE.features
STEP = {option.name: option for option in OPTIONS[Mode.STEP]}
FORWARD = {option.name: option for option in OPTIONS[Mode.FORWARD]}
LORA = [(RANK, D), (V, RANK)]
MORE_LEAVES = {
    "bias": [(V,)],
    "logit-scale-learned": [()],
    "combined": [(V,), ()],
    "k-dimensional-2": [(V, 2, D)],
    f"lora-{RANK}": LORA,
    f"frozen-weight-lora-{RANK}": LORA,
}


def run(name):
    """Inputs, call, outputs and gradients of a step of this name."""
    inputs = CASE.inputs(requires_grad=True)
    call = STEP[name].call(CASE, inputs)
    outputs = call.run()
    return inputs, call, outputs, torch.autograd.grad(outputs, call.leaves, call.upstream)


@pytest.mark.parametrize("mode", Mode)
def test_names_unique_plain_first(mode):
    names = [option.name for option in OPTIONS[mode]]
    assert len(set(names)) == len(names)
    assert names[0] == "plain"


def test_workspace_of_steps():
    for mode, default in ((Mode.STEP, WORKSPACE), (Mode.FORWARD, None)):
        ours = [option for option in OPTIONS[mode] if option.distribution == "lowtide"]
        assert {option.workspace for option in ours} == {default}
    changed = {option.name: option.workspace for option in options(Mode.STEP, 2**20)}
    assert changed == {name: None if name == "eager-none" else 2**20 for name in STEP}
    call = dataclasses.replace(STEP["plain"], workspace=1).call(CASE, CASE.inputs(requires_grad=True))
    with pytest.raises(ValueError, match="got 1 bytes"):
        call.run()


@pytest.mark.parametrize("name", STEP)
def test_step_gradients(name):
    (input_ND, weight_VD, _), call, _, grads = run(name)
    own_weight = name.startswith("frozen") or name == "k-dimensional-2"
    main = [input_ND] if own_weight else [input_ND, weight_VD]
    assert all(one is other for one, other in zip(call.leaves, main))
    assert [tuple(leaf.shape) for leaf in call.leaves[len(main) :]] == MORE_LEAVES.get(name, [])
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


DENSE = {
    "plain": {},
    "class-weight": {},
    "label-smoothing": {"label_smoothing": 0.1},
    "label-smoothing-class-weight": {"label_smoothing": 0.1},
    "probabilities": {},
    "half-ignored": {},
    "k-dimensional": {},
    "k-dimensional-2": {},
    "frozen-weight": {},
    "none": {"reduction": "none"},
    "eager-none": {"reduction": "none"},
}


@pytest.mark.parametrize("name", DENSE)
def test_step_loss(name):
    inputs = CASE.inputs(requires_grad=True)
    made = {
        key: v(CASE, {"linear_weight": inputs[1], "target": inputs[2]}) if callable(v) else v
        for key, v in STEP[name].arguments.items()
    }
    target = made.get("target", inputs[2])
    weight = made.get("linear_weight", inputs[1])
    logits = torch.einsum("nd,v...d->nv...", inputs[0], weight)
    want = F.cross_entropy(logits, target, weight=made.get("weight"), **DENSE[name])
    (loss,) = run(name)[2]
    torch.testing.assert_close(loss, want)


def test_targets():
    _, _, target_N = inputs = CASE.inputs(requires_grad=False)
    given = dict(zip(("input", "linear_weight", "target"), inputs))
    half_N = STEP["half-ignored"].arguments["target"](CASE, given)
    assert (half_N == IGNORE_INDEX).sum() == CASE.tokens // 2
    assert torch.equal(half_N, target_N.where(half_N != IGNORE_INDEX, IGNORE_INDEX))
    target_NV = STEP["probabilities"].arguments["target"](CASE, given)
    assert (target_NV >= 0).all()
    torch.testing.assert_close(target_NV.sum(1), torch.ones(CASE.tokens))


def test_upstream_of_outputs_by_token():
    for name, count in (("none", 1), ("log-prob", 1), ("entropy", 1), ("log-probs", 3), ("eager-none", 1)):
        _, call, outputs, _ = run(name)
        assert len(call.upstream) == len(outputs) == count
        assert {each.shape for each in (*call.upstream, *outputs)} == {(CASE.tokens,)}
        assert len({each[0].item() for each in call.upstream}) == count
    assert run("plain")[1].upstream is None


@pytest.mark.parametrize("name", [name for name, one in FORWARD.items() if isinstance(one, Option)])
def test_forward_matches_step(name):
    with torch.no_grad():
        outputs = FORWARD[name].call(CASE, CASE.inputs(requires_grad=False)).run()
    for one, other in zip(outputs, run(name)[2]):
        torch.testing.assert_close(one, other.detach())
