"""What tells a call from an earlier one: options, tensors, layouts, numbers.

Shapes: N tokens, D features, V classes.
"""

import pytest
import torch

from tests.ops.linear_cross_entropy.operator.remembered_call.helpers import D, N, V, check, loss_of, tensors

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


OPTIONS = [
    {"reduction": "sum"},
    {"ignore_index": 3},
    {"label_smoothing": 0.2},
    {"softcap": 1.5},
    {"z_loss": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_each_option_tells_calls_apart(device, went, options):
    given = tensors(device)
    check(*given)
    went.clear()
    check(*given, **options)
    assert went == ["operator", "straight"]


def by_columns(matrix):
    return matrix.detach().t().contiguous().t().requires_grad_()


CHANGES = {
    "tokens": lambda x, w, t: tensors(x.device, N=13),
    "features": lambda x, w, t: tensors(x.device, D=24),
    "classes": lambda x, w, t: tensors(x.device, V=48),
    "dtype": lambda x, w, t: tensors(x.device, dtype=torch.bfloat16),
    "leading dimensions": lambda x, w, t: (x.detach().view(3, 4, D).requires_grad_(), w, t.view(3, 4)),
    "strides of the input": lambda x, w, t: (by_columns(x), w, t),
    "strides of the weight": lambda x, w, t: (x, by_columns(w), t),
    "strides of the target": lambda x, w, t: (x, w, t.repeat_interleave(2)[::2]),
    "dtype of the target": lambda x, w, t: (x, w, t.int()),
    "frozen weight": lambda x, w, t: (x, w.detach(), t),
    "frozen input": lambda x, w, t: (x.detach(), w, t),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_property_of_tensors_tells_calls_apart(device, went, change):
    given = tensors(device)
    check(*given)
    went.clear()
    check(*CHANGES[change](*given))
    assert went == ["operator", "straight"]


EXTRAS = ("linear_bias", "weight", "row_weight", "logit_scale", "normalizer")


def extra(name, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = {"linear_bias": (V,), "weight": (V,), "row_weight": (N,)}.get(name, ())
    return torch.rand(shape, generator=generator).add(0.5).to(device)


@pytest.mark.parametrize("name", EXTRAS)
def test_each_other_tensor_tells_calls_apart(device, went, name):
    """Its presence, its layout and whether it is trained; its numbers are read each time."""
    x, w, target = tensors(device)
    check(x, w, target)
    went.clear()
    plain = loss_of(x, w, target).item()
    first, second = (extra(name, device, seed) for seed in (0, 1))
    found = [loss_of(x, w, target, **{name: each}).item() for each in (first, first, second)]
    assert went == ["straight", "operator", "straight", "straight"]
    assert found[0] == found[1]
    assert len({plain, found[0], found[2]}) == 3
    went.clear()
    if first.dim():
        loss_of(x, w, target, **{name: first.repeat_interleave(2)[::2]})
        assert went == ["operator"]
        went.clear()
    if name in ("linear_bias", "logit_scale"):
        trained = first.clone().requires_grad_()
        gradients = [
            torch.autograd.grad(loss_of(x, w, target, **{name: trained}), trained)[0] for _ in range(2)
        ]
        assert went == ["operator", "straight"]
        assert torch.equal(*gradients)


def test_a_scale_is_told_apart_by_its_number(device, went):
    x, w, target = tensors(device)
    check(x, w, target)
    went.clear()
    found = [loss_of(x, w, target, logit_scale=each).item() for each in (2.0, 2.0, 0.5, 1.0, 1.0)]
    assert went == ["operator", "straight", "operator", "operator", "straight"]
    assert found[0] == found[1] != found[2]
    tensor = torch.tensor(0.5, device=device)
    assert found[2] == loss_of(x, w, target, logit_scale=tensor).item()
    assert found[3] == found[4] == loss_of(x, w, target).item()
    with pytest.raises(TypeError):
        loss_of(x, w, target, logit_scale=True)


def test_class_weights_that_need_a_gradient_are_refused_each_time(device):
    x, w, target = tensors(device)
    weight = extra("weight", device)
    for trained in (False, False, True, True):
        weight.requires_grad_(trained)
        if not trained:
            loss_of(x, w, target, weight=weight)
            continue
        with pytest.raises(ValueError, match="takes no gradient"):
            loss_of(x, w, target, weight=weight)


@pytest.mark.parametrize("options", [{"ignore_index": 1.0}, {"workspace": True}, {"reduction": "none"}])
def test_errors_and_other_results_stay(device, options):
    """An option that equals a remembered one, 1.0 or True, is still refused."""
    given = tensors(device)
    check(*given, ignore_index=1)
    if options == {"reduction": "none"}:
        for _ in range(2):
            assert loss_of(*given, **options).shape == (N,)
        return
    with pytest.raises((TypeError, ValueError)):
        loss_of(*given, **options)
