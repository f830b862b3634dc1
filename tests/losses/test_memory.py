"""No loss ever holds logits: peak bytes counted by the allocator."""

import pytest
import torch

import lowtide
from lowtide.losses import contrastive, dpo, grpo, sequence_log_probs, z_loss
from lowtide.memory import peak_memory
from lowtide.ops.distillation import forward_kl, jensen_shannon, reverse_kl
from tests.support.extended import all_extended_but

PAIRS, T, D, V = 8, 64, 8, 16384
N = 2 * PAIRS * T  # 64 MiB of float32 logits
WORKSPACE = 4 << 20
A_FEW_NUMBERS = (
    64  # bytes a token: log-probability, entropy, log-sum-exp, argmax, and what a loss makes of them
)


def language(device, dtype):
    hidden = torch.randn(2 * PAIRS, T, D).to(device, dtype).requires_grad_()
    weight = torch.randn(V, D).to(device, dtype).requires_grad_()
    target = torch.randint(V, (2 * PAIRS, T))
    target[:, :7] = -100
    return hidden, weight, target.to(device)


def dpo_loss(hidden, weight, target):
    chosen, rejected = sequence_log_probs(hidden, weight, target, workspace=WORKSPACE).chunk(2)
    with torch.no_grad():
        reference = sequence_log_probs(hidden, weight * 1.01, target, workspace=WORKSPACE).chunk(2)
    return dpo(chosen, rejected, *reference)


def grpo_loss(hidden, weight, target):
    found = lowtide.linear_log_probs(hidden, weight, target, workspace=WORKSPACE)
    old = found.log_prob.detach() + 0.1
    return grpo(found.log_prob, old, torch.ones(2 * PAIRS, device=hidden.device), target != -100)


def z_loss_alone(hidden, weight, target):
    return z_loss(hidden, weight, target, workspace=WORKSPACE)


@pytest.mark.parametrize("dtype", all_extended_but([torch.float32], [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("loss_of", [dpo_loss, grpo_loss, z_loss_alone])
def test_memory_on_hidden_states(device, loss_of, dtype):
    hidden, weight, target = language(device, dtype)
    loss_of(hidden, weight, target).backward()
    hidden.grad = weight.grad = None
    with peak_memory(device) as peak:
        loss_of(hidden, weight, target).backward()
    gradients = hidden.nbytes + weight.nbytes
    assert peak.bytes <= WORKSPACE + gradients + A_FEW_NUMBERS * N
    assert peak.largest <= WORKSPACE < N * V
    assert hidden.grad[:, 7:].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_reference_freed(device, dtype):
    hidden, weight, target = language(device, dtype)
    with torch.no_grad():
        sequence_log_probs(hidden, weight, target, workspace=WORKSPACE)
        with peak_memory(device) as peak:
            found = sequence_log_probs(hidden, weight, target, workspace=WORKSPACE)
    assert found.shape == (2 * PAIRS,)
    assert peak.bytes <= WORKSPACE + A_FEW_NUMBERS * N


@pytest.mark.parametrize("dtype", all_extended_but([torch.float32], [torch.float32, torch.bfloat16]))
def test_memory_of_contrastive(device, dtype):
    rows, workspace = 2048, 1 << (19 if device == "cpu" else 20)  # 16 MiB of float32 similarities
    image, text = (torch.randn(rows, D).to(device, dtype).requires_grad_() for _ in range(2))
    scale = torch.tensor(2.0, device=device, requires_grad=True)
    contrastive(image, text, logit_scale=scale, workspace=workspace).backward()
    image.grad = text.grad = scale.grad = None
    with peak_memory(device) as peak:
        contrastive(image, text, logit_scale=scale, workspace=workspace).backward()
    gradients = image.nbytes + text.nbytes
    # The gradients of both directions are kept for backward, which adds them up.
    assert peak.bytes <= workspace + 4 * gradients
    assert peak.largest <= workspace


# Eight pairs of 4096 tokens with a vocabulary of 128k, bfloat16: 31 GiB of float32 logits, if they
# were held.
GIB = 1 << 30
LONG, WIDE, FEATURES = 4096, 128256, 1024


def long_sequences():
    hidden = torch.randn(2 * PAIRS, LONG, FEATURES, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(WIDE, FEATURES, device="cuda").mul_(0.03).bfloat16().requires_grad_()
    target = torch.randint(WIDE, (2 * PAIRS, LONG), device="cuda")
    target[:, :1000] = -100
    return hidden, weight, target


def dpo_of_pairs(hidden, weight, target):
    chosen, rejected = sequence_log_probs(hidden, weight, target).chunk(2)
    with torch.no_grad():
        reference = sequence_log_probs(hidden, weight * 1.01, target).chunk(2)
    return dpo(chosen, rejected, *reference)


def distilled(divergence):
    def loss(hidden, weight, target):
        with torch.no_grad():
            teacher_input, teacher_weight = hidden * 0.9, weight * 1.1
        return divergence(hidden, weight, teacher_input, teacher_weight, ignored=target == -100)

    return loss


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "loss_of",
    [dpo_of_pairs, *(distilled(each) for each in (forward_kl, reverse_kl, jensen_shannon))],
    ids=["dpo", "forward KL", "reverse KL", "Jensen-Shannon"],
)
def test_memory_of_eight_pairs_of_4096_tokens(loss_of):
    hidden, weight, target = long_sequences()
    with peak_memory("cuda") as peak:
        loss = loss_of(hidden, weight, target)
        loss.backward()
    assert loss.isfinite()
    assert hidden.grad.isfinite().all()
    assert weight.grad.abs().sum() > 0
    gradients = hidden.nbytes + weight.nbytes
    float32_sum = 4 * weight.numel()
    of_the_test = hidden.nbytes + 2 * weight.nbytes  # the teacher's, and a reference's
    assert peak.bytes <= GIB + float32_sum + gradients + of_the_test + 256 * target.numel()
    # By default the sum of the weight's gradient is allowed beyond 1 GiB. A chunk may take what is
    # left of both.
    assert peak.largest <= GIB + float32_sum < 4 * target.numel() * WIDE // 16
