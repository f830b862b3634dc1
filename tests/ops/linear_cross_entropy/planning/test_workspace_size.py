"""How much a call takes, without running it, beside what the allocator says when it runs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lowtide.core.errors import ArgumentError
from lowtide.core.kernels import backend
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.engines.exponentials import spec
from lowtide.ops.linear_cross_entropy.operator import ops, planner
from lowtide.ops.linear_cross_entropy.operator.fake import moved_call, with_new_graph_facts, workspace_of
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.call import Call, CallKind, NeedsGrad
from lowtide.ops.linear_cross_entropy.planning.operands import operand_access

KIB = 1 << 10
OPERATORS = torch.ops.lowtide


def arguments(dtype, workspace, wanted, reduction="mean", N=512, D=64, V=2048):
    head = [[torch.randn(N, D, dtype=dtype)], [torch.randn(V, D, dtype=dtype)], None, None]
    options = Options(reduction=reduction, compute_dtype=dtype, workspace=workspace, backend="torch")
    target = torch.randint(V, (N,))
    target[0] = -100  # so that the CPU copies the rows that count
    call = [*head, *Labels(target), (wanted, wanted, False, False), *options]
    return list(with_new_graph_facts("lowtide::linear_cross_entropy", call))


@pytest.mark.parametrize("wanted", [True, False], ids=["gradients", "loss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workspace", [400 * KIB, 1024 * KIB, 2048 * KIB, None])
def test_workspace_matches_allocator(dtype, workspace, wanted):
    """400 KiB and 1 MiB form a bfloat16 weight's gradient by class, 2 MiB hold its float32 sum."""
    call = arguments(dtype, workspace, wanted)
    ops.linear_cross_entropy(*call)
    with peak_memory("cpu") as peak:
        results = ops.linear_cross_entropy(*call)
    measured = peak.bytes - sum(each.nbytes for each in results)
    foretold = workspace_of("lowtide::linear_cross_entropy", call)
    assert workspace is None or foretold <= workspace
    # Memory reserved for vectors and numbers is never all used.
    assert 0.75 * foretold <= measured <= foretold


def test_autocast_copy_outside_workspace():
    with FakeTensorMode():
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            call = arguments(torch.bfloat16, 64 * KIB * KIB, False)
            for place, own in ((0, torch.bfloat16), (1, dtype)):
                call[place] = [torch.empty_like(call[place][0], dtype=own, device="cuda")]
            call[4] = torch.empty_like(call[4], device="cuda")
            found.append(workspace_of("lowtide::linear_cross_entropy", call))
    assert found[1] - found[0] == 2 * call[1][0].numel()


@pytest.mark.parametrize(
    ("N", "D", "V", "dtype", "kind", "rows", "product_rows"),
    [
        (16384, 4096, 128256, torch.bfloat16, "packed", 2816, 1024),
        (16384, 4096, 128256, torch.float32, "accumulate", 3328, 1024),
        (8192, 2304, 256000, torch.float32, "accumulate", 1920, 2048),
        (8192, 2304, 256000, torch.bfloat16, "packed", 1408, 2048),
    ],
)
def test_row_bytes_beside_exponentials(N, D, V, dtype, kind, rows, product_rows, monkeypatch):
    """On a Hopper card, in 1 GiB: so little that these many fit. Of fewer that would do, those
    whose products fill the waves of a card (predicted.py)."""
    made, held = planned_on_hopper(monkeypatch, N, D, V, dtype, 1 << 30)
    assert made.exponentials
    assert made.access.scales_in_gradient == (True,)
    assert (made.weight_gradient, made.rows, made.product_rows) == (kind, rows, product_rows)
    copies = 2 * V * D if dtype == torch.float32 else 0
    beside = V * D // 2 if kind == "packed" else 0
    assert rows * 2 * V + beside <= held - copies <= 1 << 30


@pytest.mark.parametrize(("D", "kind"), [(2048, "packed"), (2056, "accumulate"), (48, "accumulate")])
def test_sum_of_24_bits_first_with_gluon(D, kind, monkeypatch):
    """Though in 4 GiB there is room for one in float32, too; but not of 8 features mod 16, which
    the pipeline cannot take, and not of so few that it is not worth it. Of exponentials there are 2
    GiB at most."""
    hopper = pytest.importorskip("lowtide.core.kernels.backend")
    for pipeline, expected in ((False, "accumulate"), (True, kind)):
        monkeypatch.setattr(hopper, "pipelines_on", lambda device, pipeline=pipeline: pipeline)
        made, _ = planned_on_hopper(monkeypatch, 16384, D, 131072, torch.bfloat16, 4 << 30)
        assert (made.weight_gradient, made.sum_bits, made.rows) == (expected, 24, 8192)


def planned_on_hopper(monkeypatch, N, D, V, dtype, workspace, *, wanted=(True, True)):
    """`wanted` says whether the input and the weight get a gradient."""
    with FakeTensorMode():
        call = called_on_hopper(monkeypatch, N, D, V, dtype, workspace, wanted=wanted)
        return planner.make_plan(call), planner.peak_bytes(call)


def called_on_hopper(monkeypatch, N, D, V, dtype, workspace, *, wanted=(True, True)):
    pytest.importorskip("triton")
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: True)
    with FakeTensorMode():
        inputs, weights = (
            torch.empty(size, D, dtype=each, device="cuda")
            for size, each in ((N, torch.bfloat16), (V, dtype))
        )
        call_kind = CallKind(NeedsGrad(wanted[:1], wanted[1:], False, False), False, None, False)
        options = Options(compute_dtype=torch.bfloat16, workspace=workspace)
        return planner.with_graph_facts(Call(Head((inputs,), (weights,)), options, call_kind))


@pytest.mark.parametrize("units", [True, False])
def test_low_rank_term_sum_outside_default(monkeypatch, units):
    """Of 128 features of 128k classes it is as large as the default itself, and so is a float32
    copy of its weight, as a CPU without bfloat16 units takes it."""
    monkeypatch.setattr(requirements, "_cpu_products_refuse", lambda: None if units else "not here")
    V, R, D = 128256, 128, 64
    with FakeTensorMode():
        inputs, weights = (
            tuple(torch.empty(size, width, dtype=torch.bfloat16) for width in (D, R)) for size in (1024, V)
        )
        options = Options(compute_dtype=torch.bfloat16)
        call_kind = CallKind(NeedsGrad((True, True), (False, True), False, False), False, None, False)
        call = planner.with_graph_facts(Call(Head(inputs, weights), options, call_kind))
        made = planner.make_plan(call)
        assert planner.peak_bytes(call) <= made.workspace
        assert made.workspace == (64 << 20) + V * R * (4 if units else 4 + 4)
        with pytest.raises(ArgumentError, match="workspace must hold"):
            planner.make_plan(call._replace(options=call.options._replace(workspace=V * R * 4)))


def to_cuda(tensor):
    return torch.empty_like(tensor, device="cuda")


def test_workspace_of_moved_operators():
    """What `lowtide estimate` asks of each operator: outputs on the device, and what is held."""
    with FakeTensorMode():
        loss = arguments(torch.bfloat16, None, True, reduction="none")
        head, target, rest = loss[:4], loss[4], loss[4 + len(Labels._fields) :]
        vector_N = torch.empty(512)
        backward = (vector_N, [vector_N, vector_N])
        for name, call, outputs in (
            ("linear_cross_entropy", loss, 3),
            ("linear_cross_entropy_backward", [*backward, *loss], 2),
            ("linear_log_probs", [*head, target, *rest], 7),
            ("linear_log_probs_backward", [None, None, *backward, *head, target, *rest], 2),
        ):
            found = moved_call(getattr(OPERATORS, name).default, call, to_cuda)
            assert found is not None
            assert [each.device.type for each in found[0]] == ["cuda"] * outputs
            # On CUDA operands are not widened; all rows fit.
            assert 512 * 2048 * 4 < found[1] < 512 * 2048 * 4 * 4
        assert moved_call(torch.ops.aten.mm.default, [vector_N] * 2, lambda each: each) is None


def test_workspace_too_small():
    with pytest.raises(ArgumentError, match="workspace must hold"):
        workspace_of("lowtide::linear_cross_entropy", arguments(torch.float32, 16, True))


@pytest.mark.parametrize(
    ("N", "D", "V", "workspace", "pipelines"),
    [(16384, 512, 8192, 161_797_023, True), (12000, 4096, 8192, 346_275_421, False)],
)
def test_skipped_rows_keep_the_outputs_of_the_operator(monkeypatch, N, D, V, workspace, pipelines):
    """The shapes of its outputs follow from whether dW is kept as a float32 sum, and are asked for
    before the plan is made. At these workspaces a sum fits, but not beside gathered rows."""
    monkeypatch.setattr(backend, "pipelines_on", lambda device: pipelines)
    ways = set()
    for percent in range(60, 141, 2):
        made = called_on_hopper(monkeypatch, N, D, V, torch.bfloat16, workspace * percent // 100)
        with FakeTensorMode():
            plan, way = planner.make_plan(made), planner.weight_gradient_of(made)
        assert (plan.weight_gradient == "accumulate") == (way == "accumulate")
        ways.add(plan.weight_gradient)
    assert ways >= {"accumulate", "packed"}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("D", "V"), [(256, 3000), (1024, 8192)])
def test_counts_ask_nothing_of_a_symbolic_number_of_tokens(monkeypatch, D, V, trained):
    """A guard on it would compile a graph once more. (Few tokens are another graph.)"""
    pytest.importorskip("triton")
    monkeypatch.setattr(backend, "pipelines_on", lambda device: True)
    shapes = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with FakeTensorMode(shape_env=shapes) as mode:
        tokens = mode.from_tensor(torch.empty(4096, 1, device="meta"), symbolic_context=dynamic).shape[0]
        inputs, weight = (torch.empty(size, D, dtype=torch.bfloat16, device="cuda") for size in (tokens, V))
        kind = CallKind(NeedsGrad((True,), (trained,), False, False), False, None, False)
        options = Options(compute_dtype=torch.bfloat16, engine="exponentials")
        call = Call(Head((inputs,), (weight,)), options, kind)
        before = len(shapes.guards)
        counts = spec.SPEC.memory(call, operand_access(call))
        assert counts.of_skipping().parts > 0
        assert len(shapes.guards) == before
