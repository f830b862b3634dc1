"""The page says what Liger's calls become here: both give the same loss and the same gradients.

Liger's kernels run on the CPU in Triton's interpreter, but for those of class weights and of a soft
cap. Where Liger is not installed, these tests are skipped; a job of the workflow ci.yml installs
it.

Shapes: N tokens, D features, V classes; B pairs of T tokens.
"""

import re

import pytest
import torch

import lowtide
from lowtide import linear_cross_entropy
from lowtide.distillation import forward_kl, jensen_shannon, reverse_kl
from lowtide.losses import dpo, grpo, kto, orpo, sequence_log_probs, simpo, z_loss
from tests.docs.snippets import DOCS

pytest.importorskip("liger_kernel")
pytestmark = pytest.mark.filterwarnings("ignore")

N, D, V, B, T = 16, 8, 40, 3, 10
PAGE = (DOCS / "migrate" / "liger.md").read_text()


def loss_of_liger(result):
    """Its preference losses return the loss first."""
    return result[0] if isinstance(result, tuple) else result


def same(liger, ours, hidden, weight):
    expected, found = loss_of_liger(liger), ours
    gradients = [torch.autograd.grad(each.sum(), (hidden, weight)) for each in (expected, found)]
    for theirs, mine in zip((expected.detach(), *gradients[0]), (found.detach(), *gradients[1]), strict=True):
        assert (theirs - mine).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.fixture
def tokens():
    hidden, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    labels = torch.randint(V, (N,))
    labels[3] = -100
    return hidden, weight, labels


def probabilities(hidden, weight, labels):
    return lowtide.linear_log_probs(hidden, weight, labels).log_prob.exp().detach()


LOSSES = {
    "none": ({}, lambda x, w, y: linear_cross_entropy(x, w, y)),
    "label_smoothing": (
        {"label_smoothing": 0.1},
        lambda x, w, y: linear_cross_entropy(x, w, y, label_smoothing=0.1),
    ),
    "lse_square_scale": (
        {"lse_square_scale": 1e-2},
        lambda x, w, y: linear_cross_entropy(x, w, y, z_loss=1e-2),
    ),
    "sum": (
        {"reduction": "sum", "lse_square_scale": 1e-2},
        lambda x, w, y: linear_cross_entropy(x, w, y, reduction="sum", z_loss=1e-2),
    ),
    "rows": ({"reduction": "none"}, lambda x, w, y: linear_cross_entropy(x, w, y, reduction="none")),
    "use_token_scaling": (
        {"use_token_scaling": True},
        lambda x, w, y: linear_cross_entropy(x, w, y, row_weight=probabilities(x, w, y)),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_option_of_the_loss(tokens, name):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    options, ours = LOSSES[name]
    same(liger_fused_linear_cross_entropy(*tokens, **options), ours(*tokens), *tokens[:2])


def test_what_is_returned_beside_the_loss(tokens):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    kept = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    found = liger_fused_linear_cross_entropy(*tokens, lse_square_scale=1e-2, **kept)
    torch.testing.assert_close(found.z_loss, 1e-2 * z_loss(*tokens))
    argmax, counted = lowtide.linear_log_probs(*tokens).argmax, tokens[2] != -100
    assert torch.equal(found.predicted_tokens, argmax)
    torch.testing.assert_close(found.token_accuracy, (argmax == tokens[2])[counted].float().mean())


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_jensen_shannon(tokens, beta):
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    hidden, weight, labels = tokens
    teacher, options = (torch.randn(N, 6), torch.randn(V, 6)), {"temperature": 2.0, "ignored": labels == -100}
    if beta in (0, 1):
        ours = (reverse_kl if beta else forward_kl)(hidden, weight, *teacher, **options)
    else:
        ours = jensen_shannon(hidden, weight, *teacher, beta=beta, **options)
    theirs = LigerFusedLinearJSD(jsd_beta=beta, temperature=2.0)(hidden, weight, *teacher, labels)
    same(theirs, ours, hidden, weight)


def test_jensen_shannon_beside_the_labels(tokens):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    hidden, weight, labels = tokens
    teacher = torch.randn(N, 6), torch.randn(V, 6)
    soft = jensen_shannon(hidden, weight, *teacher, beta=0.3, temperature=2.0, ignored=labels == -100)
    theirs = LigerFusedLinearJSDLoss(compiled=False, beta=0.3, temperature=2.0)
    same(
        theirs(hidden, weight, *teacher, labels),
        0.5 * linear_cross_entropy(*tokens) + 0.5 * soft,
        hidden,
        weight,
    )


@pytest.fixture
def pairs():
    hidden, weight = torch.randn(2 * B, T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    labels = torch.randint(V, (2 * B, T))
    labels[:, :3] = -100
    labels[2, 5:] = -100
    return hidden, weight, labels


def test_dpo(pairs):
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    hidden, weight, labels = pairs
    reference_hidden, reference_weight = torch.randn(2 * B, T, D), torch.randn(V, D)
    theirs = LigerFusedLinearDPOLoss(compiled=False)
    policy = sequence_log_probs(*pairs)
    reference = sequence_log_probs(reference_hidden, reference_weight, labels)
    same(
        theirs(weight, hidden, labels, ref_input=reference_hidden, ref_weight=reference_weight),
        dpo(*policy.chunk(2), *reference.chunk(2), beta=0.1),
        hidden,
        weight,
    )


@pytest.mark.parametrize("name", ["SimPO", "ORPO"])
def test_losses_that_add_the_labels_of_the_chosen(pairs, name):
    from liger_kernel import chunked_loss

    hidden, weight, labels = pairs
    chosen, rejected = sequence_log_probs(*pairs, reduction="mean").chunk(2)
    nll = linear_cross_entropy(hidden[:B], weight, labels[:B])
    if name == "SimPO":
        ours = simpo(chosen, rejected, beta=0.1, gamma=0.5) + nll
    else:
        ours = orpo(chosen, rejected, beta=0.1) + chosen.mean() + nll
    theirs = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(compiled=False)
    same(theirs(weight, hidden, labels), ours, hidden, weight)


def test_kto(pairs):
    from liger_kernel.chunked_loss import LigerFusedLinearKTOLoss

    hidden, weight, labels = pairs
    reference_hidden, reference_weight = torch.randn(2 * B, T, D), torch.randn(V, D)
    desirable, kl = torch.arange(2 * B) % 2 == 0, torch.tensor(0.7)
    theirs = LigerFusedLinearKTOLoss(compiled=False, use_ref_model=True)(
        hidden,
        weight,
        labels,
        preference_labels=desirable,
        ref_input=reference_hidden,
        ref_weight=reference_weight,
        kl=kl,
    )
    reference = sequence_log_probs(reference_hidden, reference_weight, labels)
    same(theirs, kto(sequence_log_probs(*pairs), reference, desirable, kl), hidden, weight)


def test_grpo(pairs):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, weight, labels = pairs
    counted, advantages = labels != -100, torch.randn(2 * B)
    log_prob = lowtide.linear_log_probs(*pairs).log_prob
    old, reference = (log_prob.detach() + 0.1 * torch.randn(2 * B, T) for _ in range(2))
    ours = grpo(log_prob, old, advantages, counted, reference=reference, beta=0.04, loss_type="dapo")
    theirs = LigerFusedLinearGRPOLoss(compiled=False)(
        hidden,
        weight,
        labels.clamp(min=0),
        counted.float(),
        advantages,
        ref_per_token_logps=reference,
        old_per_token_logps=old,
    )
    same(theirs, ours, hidden, weight)


def test_page_names_every_argument_of_the_module():
    import inspect

    from liger_kernel.transformers import functional

    for name in list(inspect.signature(functional.liger_fused_linear_cross_entropy).parameters)[3:]:
        assert re.search(rf"\b{name}\b", PAGE), name
