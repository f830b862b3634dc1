"""The predicted time of a step, beside what was measured on an H200 (decision 0064)."""

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.kernels import backend
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.division import cost_model, sizes
from lowtide.ops.linear_cross_entropy.planning.division.step_time import step_seconds
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling
from tests.support.loss import call_of_sizes

pytest.importorskip("triton")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: True)
    monkeypatch.setattr(backend, "pipelines_on", lambda device: True)


def call(N, D, V, workspace, wanted=(True, True)):
    return call_of_sizes(N, D, V, workspace=workspace, wanted=wanted)


# Sizes in the order of Tiling's fields after the weight's, and ms of a step on an H200.
MEASURED = [
    ((8192, 4096, 151936), 256, (4096, 151936, 512, 8192, 7680, 0), 61.1),
    ((8192, 4096, 151936), 256, (4096, 151936, 512, 4096, 10496, 4096), 56.7),
    ((8192, 4096, 151936), 64, (4096, 151936, 512, 8192, 1536, 0), 62.7),
    ((5003, 3000, 100003), 256, (2048, 100003, 1024, 5003, 8448, 0), 20.4),
    ((5003, 3000, 100003), 256, (1536, 100003, 2048, 2059, 15744, 2944), 18.7),
    ((32768, 1024, 151936), 256, (2048, 75968, 2048, 11008, 8448, 0), 65.0),
    ((32768, 1024, 151936), 64, (2048, 75968, 2048, 8192, 2048, 0), 70.1),
    ((8192, 2880, 201088), 256, (1408, 201088, 2048, 5376, 11264, 2816), 55.2),
    ((8192, 2880, 201088), 64, (2816, 201088, 1024, 5376, 2816, 2816), 59.8),
    ((16384, 4096, 128256), 64, (3840, 128256, 1024, 16384, 1024, 0), 105.1),
]


@pytest.mark.parametrize(("shape", "workspace", "parts", "ms"), MEASURED, ids=str)
def test_measured_steps(shape, workspace, parts, ms):
    rows, chunk_classes, product_rows, *block = parts
    with FakeTensorMode():
        _, _, counts = planner._memory(call(*shape, workspace * MIB))
    tiling = Tiling(rows, chunk_classes, shape[2], product_rows, "class_blocks", 24, *block)
    assert 1e3 * step_seconds(counts, tiling) == pytest.approx(ms, rel=0.06)


@pytest.mark.parametrize(
    ("shape", "ms"),
    [
        ((16384, 4096, 128256), 76.6),
        ((8192, 4096, 151936), 43.1),
        ((8192, 2880, 201088), 42.2),
        ((5003, 3000, 100003), 14.2),
    ],
)
def test_measured_steps_by_default(shape, ms):
    with FakeTensorMode():
        assert 1e3 * planner.predicted_seconds(call(*shape, None)) == pytest.approx(ms, rel=0.06)


def test_measured_steps_with_a_frozen_weight():
    """All rows, as options.csv has them."""
    with FakeTensorMode():
        seconds = planner.predicted_seconds(call(16384, 4096, 128256, None, (True, False)))
    assert 1e3 * seconds == pytest.approx(51.5, rel=0.06)


# Whether the weight is trained, and the ratio of the time with skipping to that without, if no row
# is ignored (decision 0087). The last five were measured when programs shared all tails equally.
SKIPPING = [
    ((16384, 1024, 151936), 256, True, 1.025),
    ((16384, 1024, 151936), 1024, True, 0.989),
    ((32768, 768, 50257), 256, True, 1.086),
    ((8192, 2304, 256000), 1024, True, 1.006),
    ((4096, 1024, 151936), 1024, True, 1.047),
    ((16384, 4096, 32768), 256, True, 1.016),
    ((16384, 4096, 128256), 256, False, 1.002),
    ((16384, 4096, 128256), 64, False, 1.088),
    ((4096, 4096, 128256), 256, False, 1.020),
    ((32768, 768, 50257), 256, False, 1.042),
    ((8192, 2048, 128256), 256, False, 1.038),
    ((4096, 2048, 50304), 256, True, 1.042),
    ((16384, 1024, 151936), None, False, 1.032),
    ((16384, 1024, 151936), 256, False, 0.999),
    ((8192, 2304, 256000), 256, False, 1.027),
    ((8192, 5376, 262144), 256, False, 1.049),
]


@pytest.mark.parametrize(("shape", "workspace", "trained", "ratio"), SKIPPING, ids=str)
def test_measured_price_of_skipping(shape, workspace, trained, ratio):
    given = workspace and workspace * MIB
    with FakeTensorMode():
        _, granted, counts = planner._memory(call(*shape, given, (True, trained)))
    skipping, all_rows = (
        step_seconds(each, sizes._choose_sizes(granted, each)) for each in (counts.of_skipping(), counts)
    )
    assert skipping / all_rows == pytest.approx(ratio, abs=0.06)


def test_input_gradient_of_our_own_divides_the_last_wave(monkeypatch):
    """Measured: 49.1 ms with 4096 rows, with dX in 128 tiles, and 49.2 with 4736, in 148. Before
    the last 16 of these were divided, the first took 44.8 on another card, the second 56.4."""
    shape = (32768, 1024, 151936)
    with FakeTensorMode():
        _, _, counts = planner._memory(call(*shape, None))
    few, many = (
        step_seconds(counts.of_skipping(), Tiling(rows, shape[2], shape[2], 4096, "packed", 24))
        for rows in (4096, 4736)
    )
    monkeypatch.setattr(cost_model, "FEWEST_CLASSES_OF_PART", shape[2])
    whole = step_seconds(counts.of_skipping(), Tiling(4736, shape[2], shape[2], 4096, "packed", 24))
    assert many / few == pytest.approx(49.2 / 49.1, rel=0.05)
    assert whole / few == pytest.approx(56.4 / 44.8, rel=0.1)


def test_ignored_rows_cost_nothing_where_they_are_skipped():
    with FakeTensorMode():
        made = call(16384, 4096, 128256, 1 << 30)
        whole, half = (planner.predicted_seconds(made, ignored) for ignored in (0.0, 0.5))
        assert 0.45 * whole < half < 0.6 * whole
        blocks = call(16384, 4096, 128256, 64 * MIB)
        assert planner.predicted_seconds(blocks, 0.5) == planner.predicted_seconds(blocks)


def test_way_with_the_least_time():
    """Below 512 rows per chunk a packed sum costs more than one product more; a large sum less."""
    with FakeTensorMode():
        ways = [
            planner.make_plan(call(*shape)).weight_gradient
            for shape in ((5003, 3000, 100003, 256 * MIB), (16384, 4096, 32768, 256 * MIB))
        ]
    assert ways == ["class_blocks", "packed"]


def test_no_prediction():
    with FakeTensorMode():
        assert planner.predicted_seconds(call(4096, 2047, 128256, None)) is None
