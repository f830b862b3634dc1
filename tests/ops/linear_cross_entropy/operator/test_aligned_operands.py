"""Half-precision operands that GEMMs on CUDA read slowly are copied, with zeros after odd features.

On the CPU the kernels run through the interpreter. Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.core.strides import needs_aligned_copy
from lowtide.memory import peak_memory
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options
from lowtide.ops.linear_cross_entropy.planning.operands import needs_aligned_copies, with_aligned_operands
from tests.conftest import ON_CUDA_ALONE
from tests.support.extended import all_extended_but
from tests.support.graphs import needs_tracing
from tests.support.loss import check, differentiate, fused, make_inputs, skip_unless_runnable

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
N, V = 37, 63


def laid(tensor, layout):
    """The same numbers in another place of memory."""
    rows, D = tensor.shape
    if layout == "one element later":
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(rows, D)
    if layout == "rows with gaps":
        return torch.cat([tensor, tensor.new_zeros(rows, 3)], 1)[:, :D]
    if layout == "by columns":
        return tensor.t().contiguous().t()
    return tensor


LAYOUTS = ["by rows", "one element later", "rows with gaps", "by columns"]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", all_extended_but(["by rows", "one element later"], LAYOUTS))
@pytest.mark.parametrize("D", [19, 24])
def test_values(device, D, layout, dtype, reduction):
    skip_unless_runnable("triton", device)
    inputs = make_inputs(N, D, V, device=device, dtype=dtype, bias=True)
    operands = {
        name: laid(getattr(inputs, name).detach(), layout).requires_grad_()
        for name in ("input", "linear_weight")
    }
    inputs = replace(inputs, **operands)
    result = differentiate(fused, inputs, backend="triton", reduction=reduction)
    check(result, inputs, reduction=reduction)
    assert result["linear_weight"].is_contiguous()
    assert result["input"].shape == (N, D)


@pytest.mark.parametrize("D", [19, 24])
def test_log_probs(device, D):
    skip_unless_runnable("triton", device)
    inputs = make_inputs(N, D, V, device=device, dtype=BF16, ignored=0.0)
    x, w = inputs.input, inputs.linear_weight
    found = lowtide.linear_log_probs(x, w, inputs.target, backend="triton")
    z = x.double() @ w.double().t()
    torch.testing.assert_close(found.logsumexp.double(), z.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.argmax, z.argmax(-1))
    gradients = torch.autograd.grad(found.entropy.sum(), (x, w))
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum()
    for ours, exact in zip(gradients, torch.autograd.grad(entropy, (x, w))):
        assert (ours.double() - exact.double()).norm() <= 1e-2 * exact.double().norm()


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "needs"),
    [
        ((V, 24), (24, 1), 0, False),
        ((V, 24), (32, 1), 8, False),
        ((64, 24), (1, 64), 0, False),
        ((1, 24), (3, 1), 0, False),  # one row begins nowhere else
        ((V, 19), (24, 1), 0, True),
        ((V, 24), (25, 1), 0, True),
        ((V, 24), (24, 1), 1, True),
        ((V, 24), (1, V), 0, True),
    ],
)
def test_which_need_a_copy(shape, strides, offset, needs):
    memory = torch.zeros(1 << 12, dtype=BF16)
    operand = memory.as_strided(shape, strides, offset)
    assert needs_aligned_copy(operand, BF16) == needs
    assert not needs_aligned_copy(operand.float(), FP32)
    # Under autocast a weight of another dtype is cast; the copy lies by rows.
    cast = torch.zeros(1 << 12).as_strided(shape, strides, offset)
    assert needs_aligned_copy(cast, BF16) == (shape[1] % 8 != 0)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_nothing_is_copied_on_a_cpu(backend):
    head = Head((torch.zeros(N, 19, dtype=BF16),), (torch.zeros(V, 19, dtype=BF16),))
    options = Options(compute_dtype=BF16, backend=backend)
    assert not needs_aligned_copies(head, options)
    assert with_aligned_operands(head, options) is head
    copied = with_aligned_operands(head, options._replace(backend="triton"))
    assert copied.inputs[0].shape == (N, 24)
    assert copied.weights[0].shape == (V, 24)
    assert torch.equal(copied.weights[0][:, 19:], torch.zeros(V, 5, dtype=BF16))


def test_derivatives_of_higher_order(device):
    skip_unless_runnable("triton", device)
    inputs = make_inputs(N, 19, V, device=device, dtype=BF16, ignored=0.0)
    x, w = inputs.input, inputs.linear_weight

    def loss(backend):
        value = lowtide.linear_cross_entropy(x, w, inputs.target, backend=backend)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return torch.autograd.grad(gradient.float().square().sum(), w)[0]

    found, expected = loss("triton"), loss("reference")
    assert (found.double() - expected.double()).norm() <= 2e-2 * expected.double().norm()


@needs_tracing
@pytest.mark.parametrize("leading", [(), (2,)], ids=str)
@pytest.mark.parametrize("D", [19, 24])
def test_graph_for_a_number_of_tokens_that_data_decides(D, leading):
    """As of `hidden[mask]`, the tokens that count: no decision may depend on their number."""
    skip_unless_runnable("triton", "cpu")
    x, w = torch.randn(16, *leading, D, dtype=BF16), torch.randn(40, D, dtype=BF16)
    targets, mask = torch.randint(40, (16, *leading)), torch.arange(16) % 3 > 0

    def loss(x, w, targets, mask):
        return lowtide.linear_cross_entropy(x[mask], w, targets[mask], backend="triton")

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(loss, fullgraph=True, backend="eager")(x, w, targets, mask)
    torch.testing.assert_close(found, loss(x, w, targets, mask))


def test_heads_of_distillation():
    """On CUDA; here what is copied, and that gradients are cut to size."""
    x, w = torch.randn(5, 19, dtype=BF16, requires_grad=True), torch.randn(V, 19, dtype=BF16)
    teacher = torch.randn(5, 24, dtype=BF16), torch.randn(V, 24, dtype=BF16)
    heads = Heads(x, w, None, *teacher, None, None)
    options = DistillationOptions(0.0, student_dtype=BF16, teacher_dtype=BF16)
    copied = heads.with_aligned_operands(options)
    assert copied.student_input.shape == (5, 24)
    assert copied.student_weight.shape == (V, 24)
    assert copied.teacher_input is teacher[0]
    assert copied.teacher_weight is teacher[1]
    (gradient,) = torch.autograd.grad(copied.student_input.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


@ON_CUDA_ALONE
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_of_copies(device, reduction):
    """The copies, what the workspace says, and the gradients before and after they are cut."""
    N, D, V = 512, 257, 4096
    x, w = (torch.randn(rows, D, device=device, dtype=BF16, requires_grad=True) for rows in (N, V))
    targets, workspace = torch.randint(V, (N,), device=device), 32 << 20

    def step():
        loss = lowtide.linear_cross_entropy(x, w, targets, reduction=reduction, workspace=workspace)
        return torch.autograd.grad(loss.sum(), (x, w))

    step()
    with peak_memory(device) as peak:
        step()
    padded = 2 * 264 * (N + V)
    assert peak.bytes <= workspace + 3 * padded + 4 * N
