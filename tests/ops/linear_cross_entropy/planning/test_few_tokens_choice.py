"""Which engine runs few tokens on Hopper: the predicted times of the card and of the host decide.

On tensors without data. Shapes: N tokens, D features, V classes.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.kernels import backend
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import remembered, requirements
from tests.support.extended import all_extended_but
from tests.support.loss import call_of_sizes

pytest.importorskip("triton")

MOST_BESIDE = 64 << 20  # what a call may hold beyond the dense computation, by the documents


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: True)


def choice(N, D, V, **options):
    """The engine, how it forms dW, why it is not that of exponentials, and the bytes it holds."""
    with FakeTensorMode():
        call = call_of_sizes(N, D, V, **options)
        made, reasons = planner.make_plan(call), planner.choose_engine(call).reasons
        return made.engine, made.weight_gradient, reasons, planner.peak_bytes(call)


# Shapes that were measured on an H200 (decision 0062), by the time of one call.
FEW = [(16, 4096, 128256), (64, 4096, 128256), (256, 4096, 128256), (256, 1024, 32000), (1024, 1024, 32000),
       (256, 768, 50257), (16, 1024, 32000), (256, 2048, 128256)]  # fmt: skip
MANY = [(512, 4096, 128256), (1024, 4096, 128256), (1024, 2048, 128256), (2048, 1536, 49155),
        (2048, 768, 50264), (4096, 1024, 32000), (4096, 2048, 128256)]  # fmt: skip


@pytest.mark.parametrize("shape", FEW)
def test_few_tokens(shape):
    N, D, V = shape
    engine, way, reasons, held = choice(*shape)
    assert (engine, way) == ("logits_triton", "single_product")
    assert "predicted" in reasons["exponentials"]
    assert 2 * N * V <= held <= max(6 * N * V - 2 * (N + V) * D, 2 * N * V) + 256 * (N + D + V) + MOST_BESIDE


@pytest.mark.parametrize("shape", MANY)
def test_more_tokens(shape):
    engine, _, reasons, _ = choice(*shape)
    assert engine == "exponentials"
    assert "exponentials" not in reasons


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "none"},
        {"log_probs": True},
        {"wanted": (True, False)},
        {"wanted": (False, False)},
        {"workspace": 8 << 20},
    ],
    ids=str,
)
def test_calls_without_a_single_product(options):
    assert choice(256, 1024, 32000, **options)[0] == "exponentials"


def test_no_number_of_tokens(monkeypatch):
    """In a graph it may be a symbol."""
    monkeypatch.setattr(planner, "may_depend_on_tokens", lambda tokens: False)
    assert choice(256, 1024, 32000)[0] == "exponentials"


def test_other_cards(monkeypatch):
    """Without tensor maps few tokens take the single product, too, as float16 does on any card."""
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: False)
    assert choice(256, 1024, 32000)[:2] == ("logits_triton", "single_product")
    assert choice(256, 1024, 32000, dtype=torch.float16)[:2] == ("logits_triton", "single_product")


# Shapes that took 11 to 260 pieces (decision 0098).
FLOAT16 = [(64, 8192, 22336), (64, 2560, 2944), (1065, 8192, 12605), (672, 392, 226328), (256, 2048, 143040),
           (137, 504, 168484), (1811, 7800, 9744), (4096, 4096, 128256), (2048, 8192, 4000)]  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"log_probs": True}], ids=str)
@pytest.mark.parametrize(("N", "D", "V"), FLOAT16)
def test_few_tokens_in_float16(N, D, V, options):
    """One chunk, or two, where it takes at most 64 MiB more than the dense computation."""
    with FakeTensorMode():
        call = call_of_sizes(N, D, V, dtype=torch.float16, **options)
        made, held = planner.make_plan(call), planner.peak_bytes(call)
    assert (made.engine, made.weight_gradient) == ("logits_triton", "single_product")
    assert -(-N // made.rows) <= (2 if (N, V) == (2048, 4000) else 1)
    dense = max(6 * N * V - 2 * (N + V) * D, 2 * N * V)
    assert held <= dense + MOST_BESIDE + 256 * (N + D + V) + (2 * N * D if 2 * N <= V else 0)


@pytest.mark.parametrize("workspace", [100 << 20, 200 << 20, 400 << 20])
def test_float16_in_a_workspace(workspace):
    """A workspace that was passed is not exceeded, whatever way fits it."""
    with FakeTensorMode():
        call = call_of_sizes(672, 1024, 131072, dtype=torch.float16, workspace=workspace)
        assert planner.peak_bytes(call) <= planner.make_plan(call).workspace == workspace


def test_many_tokens_in_float16_keep_their_sum():
    """Its chunks have more rows than the memory of dW."""
    with FakeTensorMode():
        made = planner.make_plan(call_of_sizes(8192, 1024, 128256, dtype=torch.float16))
    assert (made.weight_gradient, made.rows) == ("accumulate", 2048)


def predicted(engine, N, D, V):
    with FakeTensorMode():
        call = call_of_sizes(N, D, V)
        return planner._few_tokens_seconds(call._replace(options=call.options._replace(engine=engine)))


def test_predicted_seconds():
    """Of the card within 20 % of what CUDA graphs measured, where it has most of the work."""
    measured = {
        (256, 4096, 128256): (1.396, 1.387),
        (512, 4096, 128256): (2.619, 2.273),
        (1024, 4096, 128256): (4.905, 4.327),
        (2048, 4096, 128256): (9.148, 8.425),
        (1024, 2048, 128256): (2.618, 2.206),
    }
    for shape, times in measured.items():
        for engine, milliseconds in zip(("logits_triton", "exponentials"), times):
            assert predicted(engine, *shape) == pytest.approx(1e-3 * milliseconds, rel=0.2)


WIDE = [(N, D, V) for N in (256, 512, 1024, 2048) for D in (4096, 6144, 8192, 16384)
        for V in (16384, 32768, 50304, 128256)]  # fmt: skip


@pytest.mark.parametrize("smoothing", all_extended_but([0.0], [0.0, 0.1]))
def test_wide_heads_take_three_products(smoothing):
    """A call takes class blocks nowhere, which took up to 12 times as long."""
    for N, D, V in WIDE:
        if (16 if smoothing else 4) * N <= V:
            _, way, _, held = choice(N, D, V, label_smoothing=smoothing)
            assert way == "single_product" or (way == "packed" and 16 * N > V), (N, D, V, way)
            # What the dense computation holds is no less than 2 N V.
            dense = max(6 * N * V - 2 * (N + V) * D, 2 * N * V)
            assert held <= dense + MOST_BESIDE + 256 * (N + D + V) + 2 * N * D, (N, D, V)


@pytest.mark.parametrize(("N", "D", "V"), [(4096, 8192, 32000), (2048, 8192, 16384)])
def test_few_classes_per_token(N, D, V):
    """Exponentials run, since the engine of logits would be quicker but less exact."""
    assert choice(N, D, V)[:2] == ("exponentials", "single_product")


def test_rows_of_a_small_product():
    """A product has so many rows that reading the weight takes no longer than the GEMM."""
    engine, _, _, held = choice(256, 14336, 250880)
    assert engine == "exponentials"
    assert held >= 2 * 256 * 250880 + 4 * 256 * 14336


@pytest.mark.parametrize(("N", "D", "V"), [(4096, 8192, 8192), (8192, 16384, 16384)])
def test_as_many_tokens_as_half_of_the_classes(N, D, V):
    """In place of class blocks the engine of logits takes its single GEMM."""
    assert choice(N, D, V)[:2] == ("logits_triton", "single_product")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("N", "D", "V"), [(1024, 8192, 16032), (512, 16384, 16032), (2048, 8192, 32064), (4096, 16384, 16384)]
)
@pytest.mark.parametrize("tokens_sharded", [False, True])
def test_rank_of_a_divided_head(N, D, V, dtype, tokens_sharded):
    """It holds the rows of dX in float32 and as many bytes again, at most."""
    shard = {"group": "g", "ranks": 8, "num_classes": 8 * V, "tokens_sharded": tokens_sharded}
    own = N // 8 if tokens_sharded else N
    _, _, _, held = choice(own, D, V, dtype=dtype, **shard)
    dense = max(3 * dtype.itemsize * N * V - dtype.itemsize * (N + V) * D, dtype.itemsize * N * V)
    assert held <= dense + 8 * N * D + MOST_BESIDE + 256 * (N + D + V)


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ((4096, 4096, 128256), "single_product"),
        ((8192, 8192, 128256), "single_product"),  # a sum would have one chunk too
        ((8192, 7168, 129280), "single_product"),
        ((16384, 4096, 128256), "packed"),  # in two chunks
        ((32768, 4096, 128256), "packed"),
    ],
)
def test_many_tokens_take_a_sum_in_several_chunks_alone(monkeypatch, shape, way):
    monkeypatch.setattr(backend, "pipelines_on", lambda device: True)
    remembered.forget()
    engine, found, _, held = choice(*shape)
    remembered.forget()
    assert (engine, found) == ("exponentials", way)
    # With a single product, exponentials, and at most the parts of dX and what targets keep.
    N, D, V = shape
    if way == "single_product":
        assert held <= 2 * N * V * 65 / 64 + (34 << 20) + 2 * N * D + 256 * (N + D + V)


@pytest.mark.parametrize(
    ("N", "D", "V"),
    [(2048, 2048, 4096), (4096, 4096, 8192), (1024, 8192, 2832), (4096, 8192, 4096), (4096, 2048, 1024)],
)
def test_small_call_is_one_chunk(N, D, V):
    """A small call has a sum in 24 bits; by 20 each further chunk would round what it adds."""
    with FakeTensorMode():
        call = call_of_sizes(N, D, V)
        made, held = planner.make_plan(call), planner.peak_bytes(call)
    assert (made.engine, made.weight_gradient, made.rows) == ("exponentials", "packed", N)
    assert made.sum_bits == 24
    dense = max(6 * N * V - 2 * (N + V) * D, 2 * N * V)
    assert held <= dense + MOST_BESIDE + 256 * (N + D + V)


@pytest.mark.parametrize(
    ("V", "way"), [(4096, ("exponentials", "packed")), (8192, ("logits_triton", "single_product"))]
)
def test_no_sum_in_20_bits_in_place_of_one_product(V, way):
    """A call without room for one chunk and a sum in 24 bits takes one product of logits."""
    with FakeTensorMode():
        made = planner.make_plan(call_of_sizes(1024, 8192, V, label_smoothing=0.1))
    assert (made.engine, made.weight_gradient) == way
    assert (made.rows, made.sum_bits) == (1024, 24)
