"""A call like an earlier one goes straight to its engine, and a call that is not alike does not.

Shapes: N tokens, D features, V classes.
"""

import gc
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.ops.linear_cross_entropy.operator import ops, signatures
from tests.support.loss import interpreted
from tests.support.rehearsals import in_rehearsal

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

N, D, V = 12, 16, 40


@pytest.fixture(autouse=True)
def interpreter(device):
    if device == "cpu" and not interpreted():
        pytest.skip("needs Triton's interpreter")


@pytest.fixture
def went(monkeypatch):
    """By which way each call went: "operator", or "straight"."""
    found, run, planned = [], signatures.run, ops._planned

    def count_straight(*arguments):
        loss = run(*arguments)
        found.extend([] if loss is None else ["straight"])
        return loss

    def count_planned(*arguments, **options):
        if not in_rehearsal():
            found.append("operator")
        return planned(*arguments, **options)

    monkeypatch.setattr(signatures, "run", count_straight)
    monkeypatch.setattr(ops, "_planned", count_planned)
    return found


def tensors(device, *, N=N, D=D, V=V, dtype=torch.float32):
    generator = torch.Generator().manual_seed(N * D + V)
    x = torch.randn(N, D, generator=generator).to(device, dtype)
    w = torch.randn(V, D, generator=generator).to(device, dtype)
    target = torch.randint(V, (N,), generator=generator).to(device)
    return x.requires_grad_(), w.requires_grad_(), target


def loss_of(x, w, target, **options):
    return lowtide.linear_cross_entropy(x, w, target, backend="triton", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_call_computed_again_by_checkpoint(device, dtype):
    """The second call saves what the first one did, though calls like it are known by then."""
    x, w, target = tensors(device, N=14, dtype=dtype)
    found = []

    def loss(x, w):
        return loss_of(x, w, target)

    for call in (2 * [lambda *own: checkpoint(loss, *own, use_reentrant=False)]) + 2 * [loss]:
        found.append(torch.autograd.grad(call(x, w), (x, w)))
    for gradients in found[:-1]:
        for got, want in zip(gradients, found[-1]):
            assert torch.equal(got, want)


def exact(
    x, w, target, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0
):
    """The loss and its gradients in float64."""
    x, w = (each.detach().cpu().double().requires_grad_(each.requires_grad) for each in (x, w))
    z, target = x.flatten(0, -2) @ w.t(), target.cpu().flatten().long()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    keywords = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = torch.nn.functional.cross_entropy(z, target, reduction="sum", **keywords)
    loss = loss + z_loss * (z.logsumexp(1)[target != ignore_index] ** 2).sum()
    loss = loss if reduction == "sum" else loss / (target != ignore_index).sum()
    wanted = [each for each in (x, w) if each.requires_grad]
    return loss.detach(), torch.autograd.grad(loss, wanted)


def check(x, w, target, **options):
    """Compare a call, and a second one that is alike, with float64."""
    loss, gradients = exact(x, w, target, **options)
    wanted = [each for each in (x, w) if each.requires_grad]
    for _ in range(2):
        found = loss_of(x, w, target, **options)
        torch.testing.assert_close(found.detach().cpu().double(), loss, rtol=1e-5, atol=1e-6)
        for actual, expected in zip(torch.autograd.grad(found, wanted), gradients):
            actual = actual.cpu().double()
            half = actual.dtype != wanted[0].dtype and wanted[0].dtype == torch.bfloat16
            tolerance = {"rtol": 0.05, "atol": 0.02} if half else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(actual, expected, **tolerance)


def test_like_call_goes_straight(device, went):
    check(*tensors(device))
    check(*tensors(device))  # other tensors
    assert went == ["operator", "straight", "straight", "straight"]


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


def shifted(matrix):
    """The same numbers and strides, one element later in memory."""
    wider = torch.empty(matrix.numel() + 1, dtype=matrix.dtype, device=matrix.device)
    return wider[1:].view(matrix.shape).copy_(matrix.detach()).requires_grad_()


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


@pytest.mark.parametrize("place", [0, 1])
def test_unaligned_tensors_go_by_the_operators(device, went, place):
    given = list(tensors(device))
    check(*given)
    went.clear()
    given[place] = shifted(given[place])
    check(*given)
    assert went == ["operator", "operator"]


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Named(torch.Tensor):
    """A subclass, whose own code is to see the call."""


@pytest.mark.parametrize("mode", [Functions, Dispatches, lambda: torch.profiler.profile(acc_events=True)])
def test_modes_see_the_operators(device, went, mode):
    given = tensors(device)
    check(*given)
    went.clear()
    with mode():
        loss_of(*given)
    assert went == ["operator"]


def test_subclasses_see_the_operators(device, went):
    x, w, target = tensors(device)
    check(x, w, target)
    went.clear()
    loss_of(x.detach().as_subclass(Named).requires_grad_(), w, target)
    assert went == ["operator"]


def test_autocast_is_not_remembered(device, went):
    x, w, target = tensors(device)
    check(x, w, target)
    went.clear()
    with torch.autocast(device, torch.bfloat16):
        for _ in range(2):
            loss_of(x, w, target)
    assert went == ["operator"] * 2


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


def test_a_number_as_normaliser_goes_by_the_operators(device, went):
    given = tensors(device)
    check(*given)
    went.clear()
    for _ in range(2):
        loss_of(*given, normalizer=5.0)
    assert went == ["operator"] * 2


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


@pytest.mark.parametrize("kind", ["none", "log-probabilities"])
def test_calls_by_row_go_straight(device, went, kind):
    """Their results are told apart from those of a mean, and keep the input's leading shape."""
    x, w, target = tensors(device)
    check(x, w, target)
    went.clear()

    def call(x, target):
        if kind == "none":
            return (loss_of(x, w, target, reduction="none"),)
        return lowtide.linear_log_probs(x, w, target, backend="triton")

    for given in ((x, target), (x, target), (x.view(3, 4, D), target.view(3, 4))):
        found = call(*given)
        assert all(each.shape == given[1].shape for each in found)
        found[0].sum().backward()
    assert went == ["operator", "operator", "straight", "operator", "operator"]
    node = {"none": "linear_cross_entropyBackward", "log-probabilities": "linear_log_probsBackward"}[kind]
    assert call(x, target)[0].grad_fn.name() == node


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


@pytest.mark.parametrize("kind", ["mean", "none", "log-probabilities"])
def test_second_derivatives(device, kind):
    """Backward of a straight call can be differentiated, and a retained graph run again."""
    x, w, target = tensors(device)
    factors = torch.linspace(0.5, 1.5, N, device=device)

    def loss(x, w, target, factors):
        if kind == "mean":
            return loss_of(x, w, target)
        if kind == "none":
            return loss_of(x, w, target, reduction="none") @ factors
        found = lowtide.linear_log_probs(x, w, target, backend="triton")
        return found.log_prob @ factors + found.entropy.sum()

    def true(x, w, target, factors):
        z = x @ w.t()
        if kind == "mean":
            return torch.nn.functional.cross_entropy(z, target)
        log_p = z.log_softmax(1)
        chosen = log_p.gather(1, target[:, None])[:, 0]
        if kind == "none":
            return -chosen @ factors
        return chosen @ factors - (log_p.exp() * log_p).sum()

    for _ in range(2):
        total = loss(x, w, target, factors)
    first = torch.autograd.grad(total, (x, w), retain_graph=True)
    again = torch.autograd.grad(total, (x, w), torch.full_like(total, 2.0), retain_graph=True)
    for one, two in zip(first, again):
        torch.testing.assert_close(2 * one, two)
    (dx,) = torch.autograd.grad(total, x, create_graph=True)
    (second,) = torch.autograd.grad(dx.square().sum(), w)
    xd, wd = (each.detach().cpu().double().requires_grad_() for each in (x, w))
    (dx,) = torch.autograd.grad(true(xd, wd, target.cpu(), factors.cpu().double()), xd, create_graph=True)
    (expected,) = torch.autograd.grad(dx.square().sum(), wd)
    torch.testing.assert_close(second.cpu().double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "log-probabilities"])
def test_modes_around_backward_see_the_operators(device, went, kind):
    x, w, target = tensors(device)
    for _ in range(2):
        if kind == "none":
            loss = loss_of(x, w, target, reduction="none").sum()
        else:
            loss = lowtide.linear_log_probs(x, w, target, backend="triton").log_prob.sum()
    expected = torch.autograd.grad(loss, (x, w), retain_graph=True)
    went.clear()
    with torch.profiler.profile(acc_events=True):
        found = torch.autograd.grad(loss, (x, w))
    assert went == ["operator"]
    assert all(map(torch.equal, found, expected))


def test_backward_sees_weights_that_changed(device):
    x, w, target = tensors(device)
    check(x, w, target)
    loss = loss_of(x, w, target)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_tensor_is_kept(device):
    x, w, target = tensors(device)
    check(x, w, target)
    assert signatures._calls
    kept = [weakref.ref(each) for each in (x, w)]
    del x, w
    gc.collect()
    assert [each() for each in kept] == [None] * 2
