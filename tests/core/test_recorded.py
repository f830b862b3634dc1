"""Recordings of functions that allocate and ask torch, beside the functions themselves.

Launches in recordings are tested with the operators that record them.
"""

import pytest
import torch

pytest.importorskip("triton")

from lowtide.core.compile_ahead import launches
from lowtide.core.compile_ahead.placeholders import Operation
from lowtide.core.recording import recorded
from lowtide.core.recording.recorded import RecordedFunction, record
from lowtide.core.recording.steps import AllocationStep


@pytest.fixture
def at_once(monkeypatch):
    """Record the first call of each likeness."""
    monkeypatch.setattr(recorded, "RECORDED_CALL", 1)


X, Y = torch.rand(4, 6), torch.rand(6, 4).t()
PLAIN = (None, None)  # of no likeness but None, and of tensors that begin where most do


def in_place(x, y):
    made = torch.empty_like(y)
    made.copy_(x)
    made[1:].mul_(2)
    return [made, None, made.sum(0)]


def returned_as_view(x, y):
    made = x.new_empty(6, 4).t()
    made.copy_(x + y)
    return [made, made[2:]]


def of_other_dtype(x, y):
    made = torch.empty(4, 6, dtype=torch.float64)
    whole = made.view(torch.float32)
    whole.zero_()
    whole[:, :6].copy_(x)
    return [made, torch.cat([x, y]), whole.amax(1, keepdim=True)]


def several_results(x, y):
    largest, place = x.max(1)
    significand, exponent = torch.frexp(y)
    return [largest + place, torch.ldexp(significand, exponent), x.t().matmul(y)]


def with_gaps(x, y):
    """A copy that torch looks at in another shape, and an operation that returns no tensor."""
    dtype = torch.promote_types(x.dtype, torch.float64)
    return [y.flatten() + 1, x[:, ::2].reshape(2, 6).to(dtype)]


FUNCTIONS = [in_place, returned_as_view, of_other_dtype, several_results, with_gaps]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_of_the_function(function):
    recording = record(function, (X, Y))
    assert recording is not None
    other = torch.rand(4, 6), torch.rand(6, 4).t()
    for given in ((X, Y), other):
        for found, expected in zip(recording.run(given), function(*given), strict=True):
            if expected is None:
                assert found is None
                continue
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()


def test_a_tensor_of_a_wider_one():
    wide = torch.rand(9, 6)
    recording = record(lambda x: [x[1:] + 1], (wide[4:8],))
    assert torch.equal(recording.run((wide[5:9],))[0], wide[6:9] + 1)


def test_memory_returned_as_a_view_is_made_so():
    recording = record(returned_as_view, (X, Y))
    (made,) = (step for step, _ in recording.steps if isinstance(step, AllocationStep))
    assert made.layout.shape == (4, 6)
    assert made.layout.strides == (1, 4)


def test_memory_is_freed_after_its_last_read():
    def function(x):
        first = torch.empty_like(x)
        first.copy_(x)
        total = first.sum()
        second = torch.empty_like(x)
        second.fill_(2)
        return [second.mul_(total)]

    recording = record(function, (X,))
    freed = [read for _, read in recording.steps]
    names = [getattr(step, "function", None) for step, _ in recording.steps]
    assert freed[names.index(torch.ops.aten.sum.default)] == (1,)
    assert freed[-1] == (2,)
    assert sum(map(len, freed)) == 2
    assert torch.equal(recording.run((X,))[0], 2 * X.sum().expand(4, 6))


@pytest.mark.usefixtures("at_once")
def test_numbers_that_are_read_are_not_recorded():
    function = RecordedFunction(lambda x: [x * 2 if x.sum() > 0 else x])
    for given, expected in ((X, X * 2), (-X, -X)):
        assert torch.equal(function(None, given)[0], expected)
    assert function.known == {PLAIN: None}


def test_a_call_of_many_steps_is_not_recorded():
    def doubled_often(x):
        for _ in range(launches.MOST_STEPS + 1):
            x = x * 2
        return [x]

    assert record(doubled_often, (X,)) is None


@pytest.mark.usefixtures("at_once")
def test_each_likeness_has_a_recording(monkeypatch):
    monkeypatch.setattr(recorded, "MOST", 2)
    function = RecordedFunction(lambda x: [x.new_ones(x.shape) + x])
    for rows in (1, 2, 3):
        assert torch.equal(function(rows, X[:rows])[0], X[:rows] + 1)
    assert list(function.known) == [(3, None)]


@pytest.mark.usefixtures("at_once")
def test_where_a_tensor_begins_tells_calls_apart():
    """Four bytes on, a kernel reads its numbers otherwise; 32 bytes on, it does not."""
    memory = torch.rand(64)
    function = RecordedFunction(lambda x, y: [x + 1, None])
    for first in (0, 8, 1, 9, 3):
        x = memory[first : first + 8]
        assert torch.equal(function(None, x, None)[0], x + 1)
    assert list(function.known) == [PLAIN, (None, (4, 0)), (None, (12, 0))]


def test_what_comes_often_is_recorded(monkeypatch):
    """Each likeness is counted by itself, and of many likenesses no count is kept."""
    monkeypatch.setattr(recorded, "MOST", 3)
    made, record = [], recorded.record

    def counted(function, tensors):
        made.append(tensors[0].shape[0])
        return record(function, tensors)

    monkeypatch.setattr(recorded, "record", counted)
    function = RecordedFunction(lambda x: [x + 1])
    last = recorded.RECORDED_CALL - 1
    for rows in [1] * last + [2] * last:
        assert torch.equal(function(rows, X[:rows])[0], X[:rows] + 1)
    assert made == []
    for rows in (1, 1, 2):
        assert torch.equal(function(rows, X[:rows])[0], X[:rows] + 1)
    assert made == [1, 2]
    for likeness in range(10, 20):
        function(likeness, X)
    assert len(function.calls) <= 3
    assert made == [1, 2]


@pytest.mark.usefixtures("at_once")
def test_another_layout_than_rehearsed_is_computed_anew():
    function = RecordedFunction(lambda x: [(x + 1).sum(0)])
    expected = function(None, X)[0]
    recording = function.known[PLAIN]
    place, question = next(
        (place, step) for place, (step, _) in enumerate(recording.steps) if isinstance(step, Operation)
    )
    (part,) = question.results
    other = question._replace(results=(part._replace(layout=part.layout._replace(strides=(1, 4))),))
    recording.steps[place], recording.through_triton = (other, ()), None
    assert torch.equal(function(None, X)[0], expected)
    assert function.known == {PLAIN: None}
