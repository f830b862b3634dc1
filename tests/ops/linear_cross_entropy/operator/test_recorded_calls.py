"""A call of the loss that is recorded has the bits of the call that was not, in each engine.

Shapes: N tokens, D features, V classes.
"""

from typing import Any, NamedTuple

import pytest
import torch

import lowtide
from lowtide.ops.linear_cross_entropy.engines import row_loss_triton
from lowtide.ops.linear_cross_entropy.operator import signatures
from tests.support.loss import interpreted

pytest.importorskip("triton")
recorded = pytest.importorskip("lowtide.core.recording.recorded")
recordings = pytest.importorskip("tests.support.recordings")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16 = torch.bfloat16
SIZES = 12, 16, 40
EXTRAS = ("linear_bias", "weight", "logit_scale", "row_weight", "normalizer")


class Case(NamedTuple):
    """A call: its sizes N, D and V, dtype and options, and which of the optional tensors it has."""

    sizes: tuple[int, int, int] = SIZES
    dtype: torch.dtype = torch.float32
    frozen: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    log_probs: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012

    def tensors(self, device):
        N, D, V = self.sizes
        made = {"input": torch.randn(N, D), "linear_weight": torch.randn(V, D)}
        extras = {
            "linear_bias": torch.randn(V),
            "weight": torch.rand(V),
            "logit_scale": torch.tensor(0.8),
            "row_weight": torch.rand(N),
            "normalizer": torch.tensor(7.0),
        }
        made |= {name: extras[name] for name in self.extras}
        half = ("input", "linear_weight", "linear_bias")
        trained = {*half, "logit_scale"} - {*self.frozen}
        for name, each in made.items():
            made[name] = each.to(device, self.dtype if name in half else None).requires_grad_(name in trained)
        target = torch.randint(V, (N,)).to(device)
        target[3] = -100
        return made | {"target": target}


CASES = {
    "float32": Case(),
    "frozen weight": Case(frozen=("linear_weight",)),
    "frozen input": Case(frozen=("input",)),
    "sum": Case(options={"reduction": "sum"}),
    "half precision": Case(dtype=BF16),
    "float16": Case(dtype=torch.float16),
    "many options": Case(options={"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1}),
    "several chunks": Case((80, 16, 512), options={"workspace": 130_000}),
    "all tensors": Case(extras=EXTRAS),
    "all tensors in float16": Case(dtype=torch.float16, extras=EXTRAS),
    "a number as scale": Case(options={"logit_scale": 0.7}),
    "none": Case(options={"reduction": "none"}),
    "none, half precision": Case(dtype=BF16, options={"reduction": "none"}),
    "none, all tensors": Case(extras=EXTRAS[:-1], options={"reduction": "none", "z_loss": 0.1}),
    "none, several chunks": Case((80, 16, 512), options={"reduction": "none", "workspace": 130_000}),
    "none, frozen input": Case(frozen=("input",), options={"reduction": "none"}),
    "log-probabilities": Case(log_probs=True),
    "log-probabilities, float16": Case(dtype=torch.float16, log_probs=True),
    "log-probabilities, soft cap": Case(
        dtype=BF16, log_probs=True, extras=("linear_bias", "logit_scale"), options={"softcap": 3.0}
    ),
    "log-probabilities, a number as scale": Case(log_probs=True, options={"logit_scale": 1 / 0.7}),
}


def results_of(tensors, options, *, log_probs=False):
    """The results that have a gradient, and argmax."""
    if log_probs:
        return lowtide.linear_log_probs(**tensors, backend="triton", **options)
    return (lowtide.linear_cross_entropy(**tensors, backend="triton", **options),)


@pytest.fixture
def runs(device, monkeypatch):
    """The recordings that ran; a call is recorded the first time that it goes straight."""
    if device == "cpu" and not interpreted():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(recorded, "RECORDED_CALL", 1)
    # It reads a target on the CPU, which a rehearsal cannot.
    monkeypatch.setattr(row_loss_triton, "check_classes", lambda *_: None)
    return recordings.count_runs(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_same_bits(device, monkeypatch, runs, name):
    case = CASES[name]
    by_row = case.log_probs or case.options.get("reduction") == "none"
    tensors = case.tensors(device)
    trained = [each for each in tensors.values() if each.requires_grad]
    plans, make_plan = [], signatures.make_plan

    def planned(*call):
        plans.append(make_plan(*call))
        return plans[-1]

    monkeypatch.setattr(signatures, "make_plan", planned)
    found, N = [], case.sizes[0]
    upstream = [torch.randn(N if by_row else (), device=device) for _ in range(3 if case.log_probs else 1)]
    for _ in range(3):
        results = results_of(tensors, case.options, log_probs=case.log_probs)
        gradients = torch.autograd.grad(results[: len(upstream)], trained, upstream)
        found.append([*(each.detach() for each in results), *gradients])
    assert len(runs) == (4 if by_row else 2)
    (plan,) = plans
    assert (plan.rows < N) == ("several chunks" in name)
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))
        assert [each.stride() for each in results] == [each.stride() for each in found[0]]


def shifted(upstream):
    """The same numbers, one element later in memory."""
    return torch.cat([upstream.new_zeros(1), upstream])[1:]


UPSTREAM = {
    "expanded": lambda x: x[:1].expand_as(x),
    "with gaps": lambda x: x.repeat_interleave(2)[::2],
    "shifted": shifted,
    "a view": lambda x: x.view(3, 4).t().reshape(12),
}


@pytest.mark.parametrize("layout", UPSTREAM)
@pytest.mark.parametrize("log_probs", [False, True], ids=["none", "log-probabilities"])
def test_upstream_gradients_of_any_layout(device, runs, log_probs, layout):
    options = {} if log_probs else {"reduction": "none"}
    tensors = Case().tensors(device)
    trained = [tensors["input"], tensors["linear_weight"]]
    plain = torch.randn(SIZES[0], device=device)
    other = UPSTREAM[layout](plain)
    found = []
    for upstream in (other, plain, other, other.contiguous()):
        result = results_of(tensors, options, log_probs=log_probs)[0]
        found.append(torch.autograd.grad(result, trained, upstream))
    assert len(runs) == 6
    for first, second, last in zip(found[0], found[2], found[3]):
        assert torch.equal(first, second)
        assert torch.equal(second, last)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
def test_results_that_have_a_gradient(device, runs, used):
    """A backward computes what the results of log-probabilities that are used need."""
    tensors = Case().tensors(device)
    trained = [tensors["input"], tensors["linear_weight"]]
    found = []
    for _ in range(3):
        results = results_of(tensors, {}, log_probs=True)
        assert [each.requires_grad for each in results] == [True, True, True, False]
        found.append(torch.autograd.grad(sum((2 + each) * results[each].sum() for each in used), trained))
    assert len(runs) == 4
    for gradients in found[1:]:
        assert all(map(torch.equal, gradients, found[0]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["float32", "none", "log-probabilities"])
def test_without_gradients(device, runs, mode, name):
    case = CASES[name]
    tensors = case.tensors(device)
    with mode():
        found = [results_of(tensors, case.options, log_probs=case.log_probs) for _ in range(3)]
    assert len(runs) == 2
    for results in found:
        assert not any(each.requires_grad for each in results)
        assert all(map(torch.equal, results, found[0]))


@pytest.mark.parametrize("name", ["none", "log-probabilities"])
def test_retained_graph_runs_again(device, runs, name):
    case = CASES[name]
    tensors = case.tensors(device)
    trained = [tensors["input"], tensors["linear_weight"]]
    for _ in range(2):
        result = results_of(tensors, case.options, log_probs=case.log_probs)[0].sum()
    first = torch.autograd.grad(result, trained, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(result, trained), first))
    assert len(runs) == 3


def doubled_in_place(results):
    for each in results[:3]:
        each *= 2


def zeroed_in_part(results):
    for each in results[:3]:
        each[0] = 0


def detached_and_zeroed(results):
    results[0].detach().zero_()


def unchanged(results):
    pass


@pytest.mark.parametrize("change", [unchanged, doubled_in_place, zeroed_in_part, detached_and_zeroed])
@pytest.mark.parametrize("at", [1, 99], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("leading", [(12,), (3, 4)], ids=str)
@pytest.mark.parametrize("name", ["none", "log-probabilities"])
def test_results_may_be_changed_in_place(device, runs, monkeypatch, name, leading, at, change):
    monkeypatch.setattr(recorded, "RECORDED_CALL", at)
    case = CASES[name]
    tensors = case.tensors(device)
    tensors["input"] = tensors["input"].detach().view(*leading, -1).requires_grad_()
    tensors["target"] = tensors["target"].view(leading)
    trained, found = [tensors["input"], tensors["linear_weight"]], []
    for _ in range(3):
        results = [*results_of(tensors, case.options, log_probs=case.log_probs)]
        change(results)
        gradients = torch.autograd.grad(sum(each.sum() for each in results[:3]), trained)
        found.append([*(each.detach() for each in results), *gradients])
    assert len(runs) == (4 if at == 1 else 0)
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


@pytest.mark.parametrize("name", ["float32", "none", "log-probabilities"])
def test_batched_gradients(device, runs, name):
    case = CASES[name]
    tensors = case.tensors(device)
    trained, found = [tensors["input"], tensors["linear_weight"]], []
    for _ in range(3):
        result = results_of(tensors, case.options, log_probs=case.log_probs)[0]
        upstream = torch.eye(max(1, result.numel()), device=device).view(-1, *result.shape)
        found.append(torch.autograd.grad(result, trained, upstream, is_grads_batched=True))
    assert len(runs) == 2
    for gradients in found[1:]:
        for one, first in zip(gradients, found[0]):
            torch.testing.assert_close(one, first)


@pytest.mark.parametrize("name", ["none", "log-probabilities"])
def test_parts_of_longer_sequences(device, runs, name):
    """The usual shift of a language model: operands with gaps, targets that begin at any place."""
    case = CASES[name]
    N, D, V = SIZES
    hidden, weight = torch.randn(3, N // 3 + 1, D, device=device), torch.randn(V, D, device=device)
    tokens = torch.randint(V, (3, N // 3 + 1), device=device)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    found = []
    for _ in range(3):
        tensors = {"input": hidden[:, :-1], "linear_weight": weight, "target": tokens[:, 1:]}
        results = results_of(tensors, case.options, log_probs=case.log_probs)
        assert all(each.shape == (3, N // 3) for each in results)
        gradients = torch.autograd.grad(results[0].sum(), leaves)
        found.append([*(each.detach() for each in results), *gradients])
    assert len(runs) == 4
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card does not wait for this check")
def test_targets_are_still_checked():
    x, w = torch.randn(12, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    target = torch.randint(40, (12,))
    for _ in range(3):
        lowtide.linear_cross_entropy(x, w, target, backend="triton").backward()
    target[5] = 40
    with pytest.raises(IndexError, match="classes from 0 to 39"):
        lowtide.linear_cross_entropy(x, w, target, backend="triton")


@pytest.mark.parametrize("name", ["linear_bias", "input"])
def test_tensor_that_outlives_its_transform(device, runs, name):
    """It has no memory of its own: each call unwraps it."""
    tensors = Case(extras=("linear_bias",)).tensors(device)
    kept, plain = [], tensors[name].detach()
    torch.func.grad(lambda each: (kept.append(each), each.sum())[1])(plain)
    found = [results_of(tensors | {name: each}, {})[0].item() for each in (plain, *kept * 3)]
    assert found == found[:1] * 4
