"""The promise of `workspace`, counted by the allocator."""

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.core.strides import needs_aligned_copy
from lowtide.memory import peak_memory
from tests.support.extended import all_extended_but
from tests.support.loss import fused, make_inputs, smallest_workspace

# With these sizes, a single row of logits or vector [V] too many exceeds the promise.
# On CUDA fewer than 8 features would be padded, by copies that no workspace includes.
N, D, V = (32, 8, 16384) if torch.cuda.is_available() else (16, 4, 16384)
DTYPES = [torch.float32, torch.bfloat16]
REDUCTIONS = ["mean", "sum", "none"]
BACKENDS = ["auto", "torch"]
ROOM = ["least", "2 x least", "half the logits"]
EXTRAS = [
    pytest.param({}, id="plain"),
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"bias": True, "class_weight": True, "smoothing": 0.1}, id="everything"),
]


def prepared(device, dtype, extras, room, reduction, backend="auto"):
    extras = dict(extras)
    smoothing = extras.pop("smoothing", 0.0)
    inputs = make_inputs(N, D, V, device=device, dtype=dtype, **extras)
    options = {"reduction": reduction, "label_smoothing": smoothing, "backend": backend}
    least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **options))
    workspace = {
        "least": least,
        "2 x least": 2 * least,
        "half the logits": N * V * 2,
    }[room]
    options["workspace"] = max(workspace, least)
    warm_up(inputs, options)
    return inputs, options


def warm_up(inputs, options):
    fused(inputs, **options).sum().backward()
    for leaf in inputs.leaves().values():
        leaf.grad = None


def held_by_gradients(inputs):
    return sum(leaf.nbytes for leaf in inputs.leaves().values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_workspace_kept_forward_and_backward(device, dtype, extras, reduction, room, backend):
    if device == "cpu" and backend == "torch":
        pytest.skip("that is auto")
    inputs, options = prepared(device, dtype, extras, room, reduction, backend)
    upstream = torch.ones(() if reduction != "none" else N, device=device)
    with peak_memory(device) as forward:
        loss = fused(inputs, **options)
    with peak_memory(device) as backward:
        loss.backward(upstream)
    gradients = held_by_gradients(inputs)
    assert forward.bytes <= options["workspace"] + gradients + loss.nbytes

    assert max(forward.largest, backward.largest) < N * V * 2
    if reduction == "none":
        assert forward.bytes <= options["workspace"] + loss.nbytes
        assert backward.bytes <= options["workspace"] + gradients
    for leaf in inputs.leaves().values():
        leaf.grad = None

    with peak_memory(device) as both:
        fused(inputs, **options).backward(upstream)
    assert both.bytes <= options["workspace"] + gradients + loss.nbytes


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_retained_graph_memory(device, dtype, reduction, room):
    """Those that wait in the graph, and those handed out; in float32 where they are summed so."""
    inputs, options = prepared(device, dtype, {}, room, reduction)
    with peak_memory(device) as peak:
        fused(inputs, **options).sum().backward(retain_graph=True)
    assert peak.bytes <= options["workspace"] + 2 * held_by_gradients(inputs) + 4 * N


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_loss_alone(device, dtype, extras, reduction, room):
    """Without gradients only the loss is left, and nothing of V x D but logits is allocated."""
    inputs, options = prepared(device, dtype, extras, room, reduction)
    with torch.no_grad(), peak_memory(device) as peak:
        loss = fused(inputs, **options)
    assert peak.bytes <= options["workspace"] + loss.nbytes
    assert peak.largest <= options["workspace"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("forward", [*REDUCTIONS, "log-probs"])
def test_no_grad_allocates_no_weight_size(device, forward, dtype):
    """By default, where the workspace has room for it."""
    inputs = make_inputs(N, 512, V, device=device, dtype=dtype)

    def run():
        if forward == "log-probs":
            return lowtide.linear_log_probs(inputs.input, inputs.linear_weight, inputs.target)
        return fused(inputs, reduction=forward)

    with torch.no_grad():
        run()
        with peak_memory(device) as peak:
            run()
    assert peak.largest < inputs.linear_weight.numel() * dtype.itemsize / 2
    assert peak.bytes < inputs.linear_weight.numel() * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("trained", [("input",), ("linear_bias",), ("input", "linear_bias")])
def test_frozen_weight_allocates_nothing(device, trained, reduction, dtype):
    features = 64  # so that V x D stands out
    inputs = make_inputs(N, features, V, device=device, dtype=dtype, bias=True)
    frozen = {name: leaf.detach() for name, leaf in inputs.leaves().items() if name not in trained}
    inputs = replace(inputs, **frozen)
    least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, reduction=reduction))
    options = {"reduction": reduction, "workspace": least + least // 4}
    assert options["workspace"] < V * features * dtype.itemsize
    warm_up(inputs, options)
    with peak_memory(device) as peak:
        fused(inputs, **options).sum().backward()
    assert peak.largest < V * features * dtype.itemsize
    assert peak.bytes <= options["workspace"] + held_by_gradients(inputs) + 4 * N


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_default_workspace(device, dtype, reduction):
    """64 MiB on the CPU; on CUDA 1 GiB and the float32 sum of a half-precision weight gradient."""
    promised = 64 << 20
    rows, features, classes = 2048, 8, 16384  # 128 MiB of float32 logits
    if device == "cuda":
        promised, rows, classes = 1 << 30, 8192, 65536
        promised += classes * features * 4 if dtype == torch.bfloat16 else 0
    inputs = make_inputs(rows, features, classes, device=device, dtype=dtype)
    warm_up(inputs, {"reduction": reduction})
    with peak_memory(device) as peak:
        fused(inputs, reduction=reduction).sum().backward()
    assert peak.bytes <= promised + held_by_gradients(inputs) + 4 * rows
    assert peak.largest < rows * classes * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["shifted input", "strided input", "strided weight", "autocast"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("times", [1, 2])
def test_workspace_counts_operand_copies(device, times, reduction, kind, dtype):
    inputs = make_inputs(N, D, V, device=device, dtype=dtype)
    shifted = torch.randn(4, N // 4 + 1, D).to(device, dtype)[:, :-1].requires_grad_()
    wide_x, wide_w = (torch.randn(n, 2 * D).to(device, dtype)[:, ::2].requires_grad_() for n in (N, V))
    changed = {
        "shifted input": {"input": shifted, "target": inputs.target.view(4, N // 4)},
        "strided input": {"input": wide_x},
        "strided weight": {"linear_weight": wide_w},
        "autocast": {},
    }[kind]
    inputs = replace(inputs, **changed)
    whole_copy = 0
    if kind == "autocast" and device == "cuda" and dtype == torch.float32:
        whole_copy = V * D * 2  # the copy of the weight that autocast itself would make
    if device == "cuda":  # GEMMs read some layouts slowly
        operands = inputs.input, inputs.linear_weight
        whole_copy += sum(each.nbytes for each in operands if needs_aligned_copy(each, dtype))
    with torch.autocast(device, dtype=torch.bfloat16, enabled=kind == "autocast"):
        least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, reduction=reduction))
        options = {"reduction": reduction, "workspace": times * least}
        warm_up(inputs, options)
        with peak_memory(device) as peak:
            loss = fused(inputs, **options)
        forward = peak.bytes
        kept = held_by_gradients(inputs)
        with peak_memory(device) as peak:
            loss.sum().backward()
    assert forward <= options["workspace"] + kept + whole_copy + loss.nbytes
    assert peak.bytes <= options["workspace"] + kept + whole_copy + 4 * N


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["columns", "expanded", "batched columns", "transposed"])
def test_input_copied_by_chunks(device, kind, reduction):
    """Many features, few classes: a copy of the input would be all of the memory."""
    rows, features, classes = 2048, 512, 64
    inputs = make_inputs(rows, features, classes, device=device)
    wide = torch.randn(rows, 2 * features, device=device)
    changed = {
        "columns": wide[:, ::2],
        "expanded": wide[:1, :features].expand(rows, features),
        "batched columns": wide.view(4, rows // 4, 2 * features)[..., ::2],
        "transposed": wide[:, :features].t().contiguous().t(),
    }[kind].requires_grad_()
    inputs = replace(inputs, input=changed, target=inputs.target.view(changed.shape[:-1]))
    options = {"reduction": reduction, "workspace": 1 << 20}
    warm_up(inputs, options)
    leaves = tuple(inputs.leaves().values())
    with peak_memory(device) as peak:  # backward() itself would copy a gradient to its leaf's strides
        torch.autograd.grad(fused(inputs, **options).sum(), leaves)
    gradients = rows * features * 4 + classes * features * 4
    assert peak.bytes <= options["workspace"] + gradients + 4 * rows


@pytest.mark.parametrize("dtype", all_extended_but([torch.float32], [torch.float32, torch.float64]))
def test_workspace_counts_row_vectors(device, dtype):
    rows = 40_000
    inputs = make_inputs(rows, 1, 4, device=device, dtype=dtype, bias=True, class_weight=True)
    options = {"label_smoothing": 0.1}
    options["workspace"] = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **options))
    options["workspace"] += 4096
    warm_up(inputs, options)
    with peak_memory(device) as peak:
        fused(inputs, **options).backward()
    assert peak.bytes <= options["workspace"] + held_by_gradients(inputs) + 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_positions_memory_not_summed(device, reduction, dtype):
    """Beside the workspace, tensors of the input's size in float32, however many positions there
    are; and one position's part of the weight's gradient, of none all of them, as it is put
    together."""
    rows, features, classes, positions = 512, 64, 64, 32
    x = torch.randn(rows, features).to(device, dtype).requires_grad_()
    w = torch.randn(classes, positions, features).to(device, dtype).requires_grad_()
    target = torch.randint(classes, (rows, positions), device=device)
    workspace = 1 << 20

    def step():
        loss = lowtide.linear_cross_entropy(x, w, target, reduction=reduction, workspace=workspace)
        loss.sum().backward()

    step()
    x.grad = w.grad = None
    with peak_memory(device) as peak:
        step()
    losses = 8 * 4 * target.numel() if reduction == "none" else 0
    part = w.nbytes if reduction == "none" else 4 * w[:, 0].numel()
    assert peak.bytes <= workspace + x.nbytes + w.nbytes + part + 4 * 4 * x.numel() + losses
    assert peak.bytes < positions * 4 * x.numel()
