"""Entropies as people write them take one pass of the operator, shared with log-probabilities.

Shapes: B sequences, T tokens, V classes.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.deferred.operations import log_probs
from lowtide.deferred.recorded import chunks
from tests.deferred.helpers import (
    B,
    T,
    V,
    check,
    differentiated,
    make,
    plain_and_deferred,
    roundings,
    within_eager,
)
from tests.ops.chunked_loss.helpers import close

INDEX = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(3))


def picked(log_p):
    return log_p.gather(-1, INDEX[..., None]).squeeze(-1)


def of_logps(z):
    log_p = z.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def of_probabilities(z):
    return torch.logsumexp(z, dim=-1) - torch.sum(z.softmax(-1) * z, dim=-1)


def with_log_probabilities(z):
    log_p = torch.log_softmax(z / 0.7, -1)
    return picked(log_p) - 0.01 * (log_p.exp() * log_p).sum(-1)


ONE_PASS = {
    "log-probabilities first": of_logps,
    "probabilities first": lambda z: (-z.log_softmax(-1) * z.softmax(-1)).sum(dim=-1),
    "by logits": of_probabilities,
    "capped": lambda z: of_probabilities(30 * torch.tanh(z / 30)),
    "mean": lambda z: (2 * z.softmax(-1) * z.log_softmax(-1)).mean(-1, keepdim=True).squeeze(-1),
    "another dtype": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1, dtype=torch.float32).double(),
    "tensor": lambda z: of_logps(z * torch.tensor(1.3)),
    "tensor, by logits": lambda z: of_probabilities(z / torch.tensor(0.7)),
    "with log-probabilities": with_log_probabilities,
    "selective": lambda z: picked(z.log_softmax(-1)) * z.logsumexp(-1),
}
SMOOTHED = {
    "sum of log-probabilities": lambda z: -z.log_softmax(-1).sum(dim=-1, keepdim=True).squeeze(-1),
    "mean of log-probabilities": lambda z: (0.1 * torch.tanh(z / 3).log_softmax(-1)).mean(-1),
}
SEVERAL_PASSES = {
    "two tensors": lambda z: (
        (z * torch.tensor(1.3)).softmax(-1) * (z * torch.tensor(0.7)).log_softmax(-1)
    ).sum(-1),
    "two temperatures": lambda z: (z.softmax(-1) * (z / 2).log_softmax(-1)).sum(-1),
    "three factors": lambda z: (z.softmax(-1) * z * z).sum(-1),
    "two heads' calls": lambda z: (z.softmax(-1) * z[:, :T].log_softmax(-1)).sum(-1),
}


@pytest.fixture
def passes(monkeypatch):
    calls = []

    def noted(*arguments, of=log_probs._log_probs):
        calls.append(arguments)
        return of(*arguments)

    monkeypatch.setattr(log_probs, "_log_probs", noted)
    return calls


@pytest.mark.parametrize("name", [*ONE_PASS, *SMOOTHED, *SEVERAL_PASSES])
def test_sum_over_classes(passes, monkeypatch, name):
    use = (ONE_PASS | SMOOTHED | SEVERAL_PASSES)[name]
    if name not in SEVERAL_PASSES:
        monkeypatch.setattr(chunks, "by_rows", None)
    model, tokens, _ = make(bias=True)
    expected, found, deferral = plain_and_deferred(model, lambda model: use(model(tokens)[0]))
    of_eager = roundings(model, lambda model: use(model(tokens)[0]), expected)
    close(found, expected, torch.float32 if name == "another dtype" else torch.float64, of_eager)
    assert deferral.materialized == {}
    assert len(passes) == (name in ONE_PASS)


@pytest.mark.parametrize("name", ["by logits", "log-probabilities first", "sum of log-probabilities"])
def test_sum_over_classes_in_few_digits(name):
    """Probabilities are nearly equal, so that terms of the gradients cancel."""
    model, tokens, _ = make(dtype=torch.bfloat16)
    fused = 2 if name == "by logits" else 1
    use = (ONE_PASS | SMOOTHED)[name]
    check(model, lambda model: use(model(tokens)[0].float()).sum(), fused=fused, dtype=torch.bfloat16)


def test_label_smoothing_of_transformers():
    """The loss of its LabelSmoother, spelled out, has the numbers of F.cross_entropy."""
    model, tokens, labels = make()

    def use(model):
        log_probs = -F.log_softmax(model(tokens)[0], dim=-1)
        ignored = labels.unsqueeze(-1).eq(-1)
        nll = log_probs.gather(dim=-1, index=labels.clamp(min=0).unsqueeze(-1))
        smoothed = log_probs.sum(dim=-1, keepdim=True, dtype=torch.float64)
        nll.masked_fill_(ignored, 0.0)
        smoothed.masked_fill_(ignored, 0.0)
        count = ignored.numel() - ignored.long().sum()
        return 0.9 * nll.sum() / count + 0.1 * smoothed.sum() / (count * log_probs.shape[-1])

    options = {"ignore_index": -1, "label_smoothing": 0.1}
    expected, found, deferral = plain_and_deferred(model, use)
    close(found, expected)
    assert deferral.materialized == {}
    close(found[:1], [F.cross_entropy(model(tokens)[0].mT, labels, **options)])


def test_results_of_a_pass_are_changed_in_place(passes):
    """A result that has been changed serves no other operation, and none is given twice."""
    model, tokens, _ = make()
    z = model(tokens)[0].detach()
    with lowtide.defer_logits(model):
        deferred = model(tokens)[0]
        chosen = picked(deferred.log_softmax(-1))
        first, second = deferred.logsumexp(-1), deferred.logsumexp(-1)
        assert len(passes) == 1
        first.zero_()
        close(second.detach(), z.logsumexp(-1))
        chosen.zero_()
        close(of_logps(deferred).detach(), of_logps(z))
    assert len(passes) == 1  # what was changed were copies


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_without_gradients_are_changed_in_place(passes, mode):
    """A result of another shape than the operator's is its memory, but no view to torch."""
    model, tokens, _ = make()
    z = model(tokens)[0].view(-1, V).detach()
    with lowtide.defer_logits(model), mode():
        deferred = model(tokens)[0].view(-1, V)
        deferred.logsumexp(-1).zero_()
        of_logps(deferred).zero_()
        close(deferred.logsumexp(-1), z.logsumexp(-1))
        close(of_probabilities(deferred), of_probabilities(z))
    assert len(passes) == 1


def test_gradient_of_one_result_has_no_part_of_another():
    """It is that of its own uses: here 1, not 1 - 1 with the logsumexp in sum p z."""
    model, tokens, _ = make()

    def use(model):
        z = model(tokens)[0]
        logsumexp = z.logsumexp(-1)
        entropy = logsumexp - (z.softmax(-1) * z).sum(-1)
        (gradient,) = torch.autograd.grad(entropy.sum(), logsumexp, retain_graph=True)
        assert torch.equal(gradient, torch.ones(B, T, dtype=z.dtype))
        logsumexp.register_hook(lambda gradient: 3 * gradient)
        return entropy

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected, roundings=roundings(model, use, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_confident_tokens(dtype):
    """Both terms are some hundreds and their difference is small, as is that of their gradients."""
    model, tokens, _ = make(dtype=dtype)
    with torch.no_grad():
        model.lm_head.weight *= 300
    exact = copy.deepcopy(model).double()
    expected = differentiated(exact, of_probabilities(exact(tokens)[0]))
    eager, found, deferral = plain_and_deferred(model, lambda model: of_probabilities(model(tokens)[0]))
    assert deferral.materialized == {}
    assert found[0].dtype == torch.float32
    for ours, theirs, truth in zip(found, eager, expected):
        within_eager(ours, theirs, truth, dtype)


def test_sum_of_integers():
    """Each number is rounded before they are added."""
    model, tokens, _ = make()

    def use(z):
        return (-100 * z.softmax(-1) * z.log_softmax(-1)).sum(-1, dtype=torch.int64)

    with torch.no_grad():
        expected = use(model(tokens)[0])
        with lowtide.defer_logits(model):
            found = use(model(tokens)[0])
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
    assert not torch.equal(found, (100 * of_logps(model(tokens)[0])).long())


def test_pass_without_gradients_serves_none_with():
    model, tokens, _ = make()

    def use(model):
        z = model(tokens)[0]
        with torch.no_grad():
            picked(z.log_softmax(-1))
            z.logsumexp(-1)
        return of_logps(z)

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected, roundings=roundings(model, use, expected))
