"""Functions that recordings are written as, with launches by handle that the CPU computes."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from lowtide.core.compile_ahead.placeholders import Operation
from lowtide.core.recording import script
from lowtide.core.recording.steps import AllocationStep, LaunchStep, MemoryLayout, Part, layout_of

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16


def add(*values):
    """As a compiled kernel: out = sum of x, each of a count of float32 numbers at an address."""
    *_, out, terms, count = values
    read = ctypes.c_float * count
    sums = [sum(column) for column in zip(*(read.from_address(each) for each in terms))]
    read.from_address(out)[:] = sums


def launch(out, *terms, count):
    start = LaunchStep(SimpleNamespace(params=[]), (1, 1, 1), (out, terms, count), {})
    start.compiled = SimpleNamespace(run=add, function=7, packed_metadata=())
    return start


def vector(memory, count, first=0):
    return Part(memory, 4 * first, MemoryLayout((count,), (1,), F32), not first)


def allocation(memory, count, dtype=F32):
    return AllocationStep(memory, MemoryLayout((count,), (1,), dtype), CPU)


def run(steps, given, dtypes, results):
    function = script.written([(step, ()) for step in steps], len(given), dtypes, results, by_handle=True)
    return function(given, 3)


@pytest.fixture
def allocated(monkeypatch):
    """Collect the sizes in bytes of what is allocated."""
    sizes, empty = [], torch.empty_strided

    def counted(*layout, **options):
        made = empty(*layout, **options)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty_strided", counted)
    return sizes


def test_small_memories_that_only_launches_use_are_one_allocation(allocated):
    x = torch.arange(8.0)
    steps = [
        *(allocation(1, 8), allocation(2, 8), allocation(3, 8)),
        launch(vector(1, 8), vector(0, 8), vector(0, 8), count=8),
        launch(vector(2, 8), vector(1, 8), vector(0, 8), count=8),
        launch(vector(3, 4), vector(1, 4), vector(2, 4, first=4), count=4),
    ]
    (found,) = run(steps, [x], [F32] * 4, [vector(3, 8)])
    assert torch.equal(found[:4], 2 * x[:4] + 3 * x[4:])
    assert sorted(allocated) == [8 * 4, 2 * script.APART]


def test_a_small_memory_takes_the_place_of_one_that_is_read_no_more(allocated):
    """A chain uses two vectors at a time, beside one that is read at the end."""
    x, links = torch.rand(4), 20
    last = links + 1
    steps = [(allocation(1, 4), ()), (launch(vector(1, 4), vector(0, 4), count=4), ())]
    for link in range(2, last):
        terms = vector(link - 1, 4), vector(0, 4)
        read = (link - 1,) if link > 2 else ()
        steps += [(allocation(link, 4), ()), (launch(vector(link, 4), *terms, count=4), read)]
    steps += [
        (allocation(last, 4), ()),
        (launch(vector(last, 4), vector(links, 4), vector(1, 4), count=4), ()),
    ]
    run = script.written(steps, 1, [F32] * (last + 1), [vector(last, 4)], by_handle=True)
    for each in (x, 3 * x):
        allocated.clear()
        (found,) = run([each], 3)
        torch.testing.assert_close(found, (links + 1) * each)
        assert sorted(allocated) == [16, 3 * script.APART]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6)), min_size=1, max_size=30))
def test_memories_in_use_do_not_overlap(memories):
    """Each is read for the last time so many steps after it is allocated."""
    sizes = {place: size * script.APART for place, (size, _) in enumerate(memories)}
    ends = [min(place + life, len(memories) - 1) for place, (_, life) in enumerate(memories)]
    steps = [
        (allocation(place, 4), [each for each, end in enumerate(ends) if end == place])
        for place in range(len(memories))
    ]
    places = script._places(steps, sizes)
    for place, (begin, end) in places.items():
        assert end - begin == sizes[place]
        for other in range(place + 1, ends[place] + 1):
            first, last = places[other]
            assert end <= first or last <= begin
    # The first free place is taken, so that memories used one after the other share one.
    if not any(life for _, life in memories):
        assert all(begin == 0 for begin, _ in places.values())


def test_a_large_memory_is_an_allocation_of_its_own(allocated):
    count = script.SMALL // 4 + 1
    x = torch.rand(count)
    steps = [
        *(allocation(1, count), allocation(2, 4), allocation(3, 4)),
        launch(vector(1, count), vector(0, count), count=count),
        launch(vector(2, 4), vector(1, 4), count=4),
        launch(vector(3, 4), vector(2, 4), count=4),
    ]
    (found,) = run(steps, [x], [F32] * 4, [vector(3, 4)])
    assert torch.equal(found, x[:4])
    assert sorted(allocated) == [16, 16, 4 * count]  # one small one has nothing to share with


def test_a_memory_that_torch_reads_is_a_tensor(allocated):
    x = torch.rand(4)
    question = Operation(torch.ops.aten.neg.default, (vector(2, 4),), {}, (vector(3, 4),))
    steps = [
        *(allocation(1, 4), allocation(2, 4)),
        launch(vector(1, 4), vector(0, 4), count=4),
        launch(vector(2, 4), vector(1, 4), vector(0, 4), count=4),
        question,
    ]
    (found,) = run(steps, [x], [F32] * 4, [vector(3, 4)])
    assert torch.equal(found, -2 * x)
    assert allocated == [16, 16]


@pytest.mark.parametrize("shape", [(6, 8), (3, 7), (9,)])
@pytest.mark.parametrize("dtypes", [(BF16, F32), (F32, BF16), (F32, torch.int32)])
def test_a_view_in_another_dtype_is_of_the_same_memory(shape, dtypes):
    """A new memory goes by Tensor.view where that takes its sizes; others go by their storage."""
    own, other = dtypes
    layout = layout_of(torch.empty(shape, dtype=own))
    part = Part(1, 8, MemoryLayout((1,), (1,), other), False)
    filled = Operation(torch.ops.aten.fill_.Scalar, (part, 3), {}, ())
    of_given = Operation(torch.ops.aten.fill_.Scalar, (part._replace(memory=0), 3), {}, ())
    whole = Part(1, 0, layout, True)
    zeroed = Operation(torch.ops.aten.zero_.default, (whole,), {}, ())
    given = torch.zeros(shape, dtype=own)
    steps = [AllocationStep(1, layout, CPU), zeroed, filled, of_given]
    (found,) = run(steps, [given], [own, own], [whole])
    expected = torch.zeros(shape, dtype=own)
    expected.view(-1).view(torch.uint8)[8 : 8 + other.itemsize] = torch.tensor([3], dtype=other).view(
        torch.uint8
    )
    assert torch.equal(found, expected)
    assert torch.equal(given, expected)


def test_an_operation_that_returns_several_tensors():
    x = torch.rand(3, 4)
    values, places = (
        Part(each, 0, MemoryLayout((3,), (1,), dtype), True) for each, dtype in ((1, F32), (2, torch.int64))
    )
    largest = Operation(torch.ops.aten.max.dim, (Part(0, 0, layout_of(x), True), 1), {}, (values, places))
    found = run([largest], [x], [F32, F32, torch.int64], [places, None, values])
    assert torch.equal(found[0], x.argmax(1))
    assert found[1] is None
    assert torch.equal(found[2], x.amax(1))
