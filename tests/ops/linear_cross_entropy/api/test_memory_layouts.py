"""The promise of `workspace` for operands that no product reads as is, counted by the allocator.

Shapes: N tokens, D features, V classes.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import lowtide
from lowtide.memory import peak_memory
from lowtide.ops.distillation import forward_kl
from lowtide.ops.linear_cross_entropy import dispatch
from tests.support.loss import smallest_workspace

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LAYOUTS = {
    "rows": lambda R, S: torch.randn(R, S),
    "columns": lambda R, S: torch.randn(S, R).t(),
    "padded": lambda R, S: torch.randn(R, S + 3)[:, :S],
    "every other": lambda R, S: torch.randn(R, 2 * S)[:, ::2],
    "one row": lambda R, S: torch.randn(1, S).expand(R, S),
    "one column": lambda R, S: torch.randn(R, 1).expand(R, S),
    "offset": lambda R, S: torch.randn(R + 2, S + 1)[1 : R + 1, 1:],
}


def matrix(R, S, layout, dtype):
    """A leaf with these strides, whatever the dtype."""
    made = LAYOUTS[layout](R, S)
    size = made.untyped_storage().nbytes() // 4
    flat = torch.randn(size).to(dtype)
    return flat.as_strided(made.shape, made.stride(), made.storage_offset()).requires_grad_()


def over(step, workspace, again=True):
    """Bytes held beyond the workspace and what `step` returns."""
    if again:
        step(workspace)  # kernels are compiled, lazily made things are made
    with peak_memory("cpu") as peak:
        results = step(workspace)
    return peak.bytes - sum(each.nbytes for each in results) - workspace


def most_over(loss, leaves):
    def step(workspace):
        results = loss(workspace)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [torch.ones_like(each) for each in results]
        return (*results, *torch.autograd.grad(results, leaves, upstream))

    least = smallest_workspace(step)
    return max(over(step, int(times * least)) for times in (1, 1.5, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "extras"), [(torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_layout_memory_input_and_weight(dtype, layout, extras):
    """Wide enough for the CPU's own bfloat16 products, where there are any."""
    N, D, V = 40, 1000, 1049
    x, w = matrix(N, D, layout, dtype), matrix(V, D, layout, dtype)
    target = torch.randint(V, (N,))
    bias = torch.randn(V).to(dtype).requires_grad_() if extras else None
    class_weight = torch.rand(V).to(dtype) if extras else None
    leaves = [each for each in (x, w, bias) if each is not None]

    def step(workspace):
        loss = lowtide.linear_cross_entropy(
            x, w, target, linear_bias=bias, weight=class_weight, workspace=workspace
        )
        return (loss, *torch.autograd.grad(loss, leaves))

    for workspace in (max(149_782, smallest_workspace(step)), 600_000):
        assert over(step, workspace) <= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layout", "ignored"), [("columns", False), ("rows", True)])
def test_layout_memory_input_that_is_copied(dtype, layout, ignored):
    """A call copies X by rows: in class blocks, in chunks with a sum, and in one chunk."""
    N, D, V = 40, 1000, 1049
    x, w = matrix(N, D, layout, dtype), matrix(V, D, "rows", dtype)
    target = torch.randint(V, (N,))
    if ignored:
        target[::20] = -100

    def step(workspace):
        loss = lowtide.linear_cross_entropy(x, w, target, workspace=workspace)
        return (loss, *torch.autograd.grad(loss, [x, w]))

    for workspace in range(smallest_workspace(step), 6_000_000, 380_000):
        assert over(step, workspace, again=False) <= 0, workspace


@pytest.mark.parametrize(("V", "smoothing"), [(3, 0.0), (30, 0.1), (300, 0.0)])
def test_layout_memory_few_classes_and_ignored_rows(V, smoothing):
    """In half precision a chunk's rows of dX are rounded before they are stored."""
    x, w = (matrix(rows, 1000, "rows", torch.float16) for rows in (300, V))
    target = torch.randint(V, (300,))
    target[::2] = -100

    def step(workspace):
        loss = lowtide.linear_cross_entropy(x, w, target, label_smoothing=smoothing, workspace=workspace)
        return (loss, *torch.autograd.grad(loss, [x, w]))

    least = smallest_workspace(step)
    assert max(over(step, times * least) for times in (3, 5, 10)) <= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["one row", "one column", "columns"])
def test_layout_memory_second_term_and_teacher(layout, dtype):
    N, D, R, V = 24, 40, 12, 500
    inputs = [torch.randn(N, size).to(dtype).requires_grad_() for size in (D, R)]
    weights = [matrix(V, D, "rows", dtype), matrix(V, R, layout, dtype)]
    target = torch.randint(V, (N,))
    assert most_over(
        lambda workspace: dispatch.cross_entropy(inputs, weights, target, workspace=workspace),
        [*inputs, *weights],
    ) <= 0  # fmt: skip
    teacher = matrix(N, R, layout, dtype).detach(), matrix(V, R, layout, dtype).detach()
    student = inputs[0], matrix(V, D, layout, dtype)
    assert most_over(lambda workspace: forward_kl(*student, *teacher, workspace=workspace), student) <= 0


sizes = st.integers(0, 12).flatmap(lambda power: st.integers(2 ** (power // 2), 2 ** ((power + 1) // 2) + 1))


@pytest.mark.extended
@settings(max_examples=25, deadline=None)
@given(
    N=sizes,
    D=sizes,
    V=st.one_of(sizes, st.integers(64, 300)),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(st.sampled_from([*LAYOUTS]), st.sampled_from([*LAYOUTS])),
    reduction=st.sampled_from(["mean", "none", "log-probs"]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    extras=st.booleans(),
)
def test_layout_memory_random(N, D, V, dtype, layouts, reduction, ignored, extras):
    x, w = matrix(N, D, layouts[0], dtype), matrix(V, D, layouts[1], dtype)
    target = torch.randint(V, (N,)).masked_fill(torch.rand(N) < ignored, -100)
    bias = torch.randn(V).to(dtype).requires_grad_() if extras else None
    options = {"linear_bias": bias, "softcap": 20.0 if extras else None}

    def loss(workspace):
        if reduction == "log-probs":
            return tuple(lowtide.linear_log_probs(x, w, target, workspace=workspace, **options))[:3]
        smoothing = 0.1 if extras else 0.0
        options_of_loss = {"reduction": reduction, "label_smoothing": smoothing, "workspace": workspace}
        return lowtide.linear_cross_entropy(x, w, target, **options, **options_of_loss)

    leaves = [each for each in (x, w, bias) if each is not None]
    slack = 8 * N if reduction == "log-probs" else 0  # its fourth result, which needs no gradient
    assert most_over(loss, leaves) <= slack
