"""A number a row, or a few: the same as of real logits, gradients included, and no logits."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.operations.log_probs import log_probs
from lowtide.deferred.recorded import chunks
from tests.deferred.helpers import B, T, V, make, plain_and_deferred, roundings
from tests.ops.chunked_loss.helpers import close

INDEX = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))
SEVERAL = torch.randint(V, (B, T, 5), generator=torch.Generator().manual_seed(4))


def entropy(z):
    log_p = F.log_softmax(z, dim=-1)
    return -(log_p.exp() * log_p).sum(-1)


DIFFERENTIABLE = {
    "logsumexp": lambda z: z.logsumexp(-1),
    "logsumexp, kept": lambda z: torch.logsumexp(z, dim=2, keepdim=True),
    "logsumexp of a tuple": lambda z: torch.logsumexp(z, (-1,)),
    "logsumexp by rows": lambda z: torch.stack([torch.logsumexp(each, dim=-1) for each in z]),
    "logsumexp after a cap": lambda z: (torch.tanh(z / 3) * 3).logsumexp(-1),
    "logsumexp of log_softmax": lambda z: (z.log_softmax(-1) * 2).logsumexp(-1),
    "log-probabilities": lambda z: F.log_softmax(z, dim=-1).gather(-1, INDEX[..., None]),
    "log-probabilities, negative": lambda z: -z.log_softmax(-1).gather(2, INDEX[..., None]).squeeze(-1),
    "log-probabilities, rows flat": lambda z: F.log_softmax(z.view(-1, V), 1).gather(1, INDEX.view(-1, 1)),
    "log-probabilities, shifted": lambda z: (
        z[:, :-1].log_softmax(-1).gather(-1, INDEX[:, 1:, None]).squeeze(-1)
    ),
    "log-probabilities, capped": lambda z: (
        (30 * torch.tanh(z / 30)).div(0.7).log_softmax(-1).gather(-1, INDEX[..., None])
    ),
    "log-probabilities by index": lambda z: z.view(-1, V).log_softmax(-1)[
        torch.arange(B * T), INDEX.flatten()
    ],
    "log-probabilities along a dimension": lambda z: torch.take_along_dim(
        z.log_softmax(-1), INDEX.unsqueeze(-1), dim=2
    ).squeeze(-1),
    "log-probabilities of several": lambda z: z.log_softmax(-1).gather(-1, SEVERAL),
    "logits of a class": lambda z: z.gather(-1, INDEX[..., None]),
    "logits of several": lambda z: torch.gather(z, 2, SEVERAL),
    "logits of several, along a dimension": lambda z: z.take_along_dim(SEVERAL, -1),
    "probabilities of a class": lambda z: z.softmax(-1).gather(-1, INDEX[..., None]),
    "selective": lambda z: z.gather(-1, INDEX[..., None]).squeeze(-1) - z.logsumexp(-1),
    "entropy": entropy,
    "sum of log-probabilities": lambda z: -F.log_softmax(z, dim=-1).sum(-1, keepdim=True),
    "mean": lambda z: z.mean(dim=-1),
    "mean of all": lambda z: z.mean(),
    "mean of a row": lambda z: z[1, 2].mean(),
    "mean of all, shifted, kept": lambda z: z[..., :-1, :].mean(keepdim=True, dim=()),
    "sum over positions and classes": lambda z: torch.sum(z.float(), (-1, 1), dtype=torch.float64),
    "entropy of all": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum() / (B * T),
    "classes second, sum of all": lambda z: z.transpose(1, 2).tanh().sum(dim=(0, 1, 2)),
    "largest": lambda z: z.max(dim=-1).values,
    "largest, kept": lambda z: torch.max(z, -1, keepdim=True)[0],
    "amax": lambda z: z.softmax(-1).amax(-1),
    "topk": lambda z: z.topk(3, dim=-1).values,
    "classes second": lambda z: z.transpose(1, 2).logsumexp(1),
    "times a vector": lambda z: (z * torch.linspace(0, 1, V, dtype=z.dtype)).sum(-1),
}
INDICES = {
    "argmax": lambda z: z.argmax(-1),
    "argmax, kept": lambda z: torch.argmax(z, dim=-1, keepdim=True),
    "argmax of probabilities": lambda z: z.float().softmax(-1).argmax(dim=2),
    "argmax of the last": lambda z: z[:, -1, :].argmax(-1),
    "max": lambda z: z.max(-1).indices,
    "topk": lambda z: torch.topk(z, 4).indices,
    "accuracy": lambda z: (z.view(-1, V).argmax(1) == INDEX.flatten()).double().mean(),
}


@pytest.fixture(params=["one chunk", "a row at a time"])
def _chunks(request, monkeypatch):
    if request.param == "a row at a time":
        monkeypatch.setattr(chunks, "DEFAULT_WORKSPACE", {"cpu": 1})


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_values_per_row(name, tied):
    model, tokens, _ = make(tied=tied, bias=True)

    def use(model):
        return DIFFERENTIABLE[name](model(tokens)[0])

    expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.materialized == {}
    close(found, expected, roundings=roundings(model, use, expected))


@pytest.mark.parametrize("name", INDICES)
def test_row_indices(name):
    model, tokens, _ = make(bias=True, dtype=torch.float32)
    expected = INDICES[name](model(tokens)[0])
    with lowtide.defer_logits(model) as deferral:
        found = INDICES[name](model(tokens)[0])
    assert deferral.materialized == {}
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("result", ["topk", "max"])
def test_row_named_results(result):
    model, tokens, _ = make()
    arguments = (2,) if result == "topk" else (-1,)
    expected = getattr(model(tokens)[0], result)(*arguments)
    with lowtide.defer_logits(model):
        found = getattr(model(tokens)[0], result)(*arguments)
    assert type(found) is type(expected)
    assert torch.equal(found.indices, expected.indices)


def test_row_negative_index_refused():
    model, tokens, _ = make()
    classes = f"target must hold classes from 0 to {V - 1}, got -100$"
    with lowtide.defer_logits(model), pytest.raises(IndexError, match=classes):
        model(tokens)[0].log_softmax(-1).gather(-1, torch.full((B, T, 1), -100))


def test_row_index_from_the_end():
    """take_along_dim counts a negative index from the end, in versions of torch that do so."""
    model, tokens, _ = make()
    logits, index = model(tokens)[0], torch.full((B, T, 1), -2)
    try:
        expected = logits.take_along_dim(index, -1)
    except RuntimeError:
        pytest.skip("this torch refuses negative indices")
    with lowtide.defer_logits(model) as deferral:
        found = model(tokens)[0].take_along_dim(index, -1)
    assert deferral.materialized == {}
    close(found, expected)


def test_row_index_of_truth_values_refused():
    model, tokens, _ = make()
    index = torch.ones(B, T, 1, dtype=torch.bool)
    refused, warned = pytest.raises(RuntimeError, match="should be Long"), pytest.warns(RealLogitsWarning)
    with lowtide.defer_logits(model), refused, warned:
        model(tokens)[0].take_along_dim(index, -1)


def test_row_values_no_grad():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        with torch.no_grad():
            found = logits.log_softmax(-1).gather(-1, INDEX[..., None])
            detached = logits.float()
        assert not found.requires_grad
        assert logits.requires_grad
        assert not detached.requires_grad
        assert not detached.logsumexp(-1).requires_grad


def test_row_metadata():
    model, tokens, _ = make(dtype=torch.bfloat16)
    with lowtide.defer_logits(model) as deferral:
        logits = model(tokens)[0]
        assert logits.shape == (B, T, V) == logits.size()
        assert (logits.size(-1), logits.dim(), logits.ndim, logits.numel(), len(logits)) == (
            V,
            3,
            3,
            B * T * V,
            B,
        )
        assert (logits.dtype, logits.device.type, logits.is_cuda) == (torch.bfloat16, "cpu", False)
        assert logits.float().dtype == torch.float32
        assert logits.is_contiguous()
        assert not logits.transpose(1, 2).is_contiguous()
        assert logits.stride() == (T * V, V, 1)
        uses = (torch.tanh, lambda z: z.detach(), lambda z: z.float(), lambda z: z / 2 + torch.ones(()))
        for view in (logits, logits.transpose(1, 2), logits[:, 1:]):
            real = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype)
            for use in uses:
                assert (use(view).stride(), use(view).dtype) == (use(real).stride(), use(real).dtype)
        assert torch.numel(logits) == B * T * V
        assert torch.is_floating_point(logits)
        assert logits.new_zeros(()).dtype == torch.bfloat16
        assert torch.zeros_like(logits).shape == logits.shape
        assert torch.zeros_like(logits).device.type == "cpu"
        assert repr(logits) == "DeferredLogits(shape=[3, 7, 63], dtype=torch.bfloat16, device=cpu)"
        assert deferral.materialized == {}


def test_mean_of_half_precision_logits():
    """It is summed in float32 and rounded once, as torch's is."""
    model, tokens, _ = make(dtype=torch.bfloat16)
    logits = model(tokens)[0]
    with lowtide.defer_logits(model) as deferral:
        found, total = model(tokens)[0].mean(), model(tokens)[0].sum(dtype=torch.float64)
    assert deferral.materialized == {}
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, logits.double().mean().bfloat16(), rtol=2**-8, atol=0)
    torch.testing.assert_close(total, logits.double().sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"dtype": torch.int64}, {"dim": (0, 1)}, {"dim": (0, 1, 0)}])
def test_sum_with_real_logits(options):
    """A sum of numbers that are rounded first, one over rows alone, and one that torch refuses."""
    model, tokens, _ = make()
    real = model(tokens)[0].detach()
    refused = len(options.get("dim", ())) == 3
    with lowtide.defer_logits(model) as deferral:
        logits = model(tokens)[0].detach()
        outcome = pytest.raises(RuntimeError, match="multiple times") if refused else contextlib.nullcontext()
        with outcome, pytest.warns(RealLogitsWarning, match="torch.sum"):
            found = logits.sum(**options)
    assert refused or torch.equal(found, real.sum(**options))
    assert deferral.materialized == {"torch.sum": 1}


def test_log_probs_by_chunks():
    """All four results of a head that the operators do not take, in one pass of chunks."""
    model, tokens, _ = make(bias=True)

    def use(model):
        logits = model(tokens)[0] * torch.linspace(0.5, 2, V, dtype=torch.float64)
        found = log_probs(logits, INDEX)
        assert torch.equal(found.argmax, logits.argmax(-1))
        return torch.stack(found[:3])

    expected, found, deferral = plain_and_deferred(model, use)
    assert (deferral.fused, deferral.materialized) == (1, {})
    close(found, expected, roundings=roundings(model, use, expected))


def test_entropy_with_impossible_class():
    logits = torch.tensor([[0.3, -torch.inf, 1.0]], requires_grad=True)
    possible = logits.detach()[:, [0, 2]].requires_grad_()
    found = log_probs(logits, torch.tensor([2])).entropy
    expected = torch.distributions.Categorical(logits=possible).entropy()
    close(found, expected, torch.float32)
    (of_logits,) = torch.autograd.grad(found, logits)
    (of_possible,) = torch.autograd.grad(expected, possible)
    assert of_logits[0, 1] == 0
    close(of_logits[:, [0, 2]], of_possible, torch.float32)


def test_nll_loss_of_detached_log_probabilities():
    model, tokens, targets = make()

    def loss(logits):
        return F.nll_loss(F.log_softmax(logits, -1).detach().view(-1, V), targets.view(-1), ignore_index=-1)

    expected = loss(model(tokens)[0])
    with lowtide.defer_logits(model) as deferral:
        found = loss(model(tokens)[0])
        with torch.no_grad():
            again = F.nll_loss(
                F.log_softmax(model(tokens)[0], -1).view(-1, V), targets.view(-1), ignore_index=-1
            )
        assert (deferral.fused, deferral.materialized) == (2, {})
    assert not found.requires_grad
    close([found, again], [expected, expected])
