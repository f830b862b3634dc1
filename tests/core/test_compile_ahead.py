"""Rehearsals, whose tensors have no memory, beside the real operations; threads that compile."""

import threading
import types

import pytest
import torch

pytest.importorskip("triton")

from lowtide.core.compile_ahead import launches as compile_ahead
from lowtide.core.compile_ahead.notes import in_rehearsal
from lowtide.core.compile_ahead.placeholders import Placeholder, WithoutMemory, placeholder_of
from lowtide.core.kernels import launch
from lowtide.core.kernels.launch import RememberedKernel

X, Y = torch.rand(4, 6), torch.rand(6, 5, dtype=torch.bfloat16)
HALF, PLACES, FLAGS = (
    torch.rand(6, 5).half(),
    torch.tensor([2, 0, 1]),
    torch.tensor([True, False, True, True]),
)

OPERATIONS = {
    "views": lambda: (X[1:3, 2:], X.t(), X.view(3, 8), X.view(torch.int32), X[0], X[:, None].expand(4, 2, 6)),
    "new": lambda: (X.new_empty(3), X.new_zeros(2, 2), torch.empty(3, dtype=torch.int16, device=X.device)),
    "like": lambda: (torch.empty_like(X, dtype=torch.int32), torch.ones_like(FLAGS), torch.zeros_like(Y)),
    "filled": lambda: (torch.full((), 3.0), torch.zeros(2), torch.ones(3, 1), torch.arange(2, 9)),
    "promotion": lambda: (X * 2, Y * 2, Y + X.sum(), PLACES / 2, PLACES * 1.5, Y * torch.rand(5)),
    "masks": lambda: ((X > 0.5) & (X < 1), ~FLAGS, X == 0, FLAGS | FLAGS, X.masked_fill(FLAGS[:, None], 0)),
    "several results": lambda: (*torch.frexp(X), *X.max(1), *PLACES.sort(stable=True), *X.topk(3)),
    "of vectors": lambda: (FLAGS.all(), FLAGS.any(), torch.stack([PLACES, PLACES]), torch.cat([Y, Y])),
    "flattened": lambda: (X.t().flatten(), X[:, ::2].reshape(6, 2), X.flatten()),
    "sums": lambda: (X.sum(0), X.amax(), Y.sum(0, dtype=torch.float32), X.amin(1), X.sum()),
    "products": lambda: (X @ X.t(), torch.mm(X, torch.empty(6, 3)), X.t().matmul(X)),
    "in place": lambda: (X.clone().mul_(2), torch.mm(X, X.t(), out=X.new_empty(4, 4)), X.clone().add_(1)),
    "of rows": lambda: (X.index_select(0, PLACES), X[PLACES], X[PLACES, 1]),
    "other dtypes": lambda: (X.to(torch.bfloat16), Y.float(), FLAGS.long(), X.double(), HALF.contiguous()),
    "a copy": lambda: (X.new_empty(4, 6).copy_(X), torch.empty_like(X).zero_()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_have_the_real_shapes(monkeypatch, name):
    operation = OPERATIONS[name]
    real = operation()
    for each in ("X", "Y", "HALF", "PLACES", "FLAGS"):
        monkeypatch.setitem(globals(), each, placeholder_of(globals()[each]))
    with WithoutMemory():
        found = operation()
    assert len(found) == len(real)
    for own, expected in zip(found, real):
        assert type(own) is Placeholder
        assert (own.shape, own.dtype, own.device) == (expected.shape, expected.dtype, expected.device)
        assert own.is_contiguous() == expected.is_contiguous()


def test_addresses_tell_alignment_and_memory():
    memory = torch.zeros(64, dtype=torch.bfloat16)
    odd, other = placeholder_of(memory[1:33]), placeholder_of(torch.zeros(8))
    assert odd.data_ptr() % 16 == memory[1:].data_ptr() % 16 == 2
    assert other.data_ptr() % 16 == 0
    with WithoutMemory():
        assert odd[4:].data_ptr() == odd.data_ptr() + 8
        assert odd.view(4, 8).data_ptr() == odd.data_ptr()
        assert torch.empty_like(odd).data_ptr() % 16 == 0
        kept = torch.empty(3), torch.empty(3)
        assert kept[0].data_ptr() != kept[1].data_ptr()


def test_placeholder_has_no_use_outside():
    with pytest.raises(NotImplementedError, match="without memory"):
        placeholder_of(X) + 1


def test_nothing_else_is_rehearsed():
    """Numbers are not read, and no other operator runs, such as a collective."""
    operations = (
        lambda x: bool(x.any()),
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.ops.prims.neg.default(x),
    )
    for operation in operations:
        with pytest.raises(NotImplementedError, match="in a rehearsal"):
            compile_ahead.rehearse(operation, X)
    assert not in_rehearsal()


def test_writes_nothing_and_draws_nothing():
    x, before, state = X.clone(), X.clone(), torch.get_rng_state()

    def function(x):
        x.mul_(2).zero_()
        x[0] = 1
        torch.mm(x, x.t(), out=x[:, :4])
        torch.rand(3, out=x[0, :3])

    version = x._version
    assert compile_ahead.rehearse(function, x) == []
    assert torch.equal(x, before)
    assert x._version == version
    assert torch.equal(torch.get_rng_state(), state)


# Threads.


class Kernel:
    """Takes the place of Triton's, and records what is compiled and launched in which thread."""

    def __init__(self, name, record, *, fails=False, waits_for=None):
        self.fn, self.record, self.fails, self.waits_for = name, record, fails, waits_for
        self.device_caches, self.kinds = {0: None}, set()
        self.compiled = threading.Event()

    @property
    def cache_key(self):
        self.record.append(("key", self.fn, threading.get_ident()))
        return self.fn

    def warmup(self, *arguments, grid, **constants):
        kind = compile_ahead.Launch(self, grid, arguments, constants).kind
        if kind in self.kinds:
            return types.SimpleNamespace(run=None)
        self.kinds.add(kind)
        if self.waits_for is not None:
            assert self.waits_for.wait(30)
        self.record.append(("compile", self.fn, threading.get_ident()))
        if self.fails:
            raise RuntimeError("no such instruction")
        self.compiled.set()
        return types.SimpleNamespace(run=None)

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.record.append(("launch", self.fn, threading.get_ident()))
            if self.fails:
                raise RuntimeError("no such instruction")

        return run


@pytest.fixture
def record(monkeypatch):
    active = types.SimpleNamespace(get_current_device=lambda: 0, set_current_device=lambda device: None)
    for module in (compile_ahead, launch):
        monkeypatch.setattr(module, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(compile_ahead, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(compile_ahead.os, "cpu_count", lambda: 4)
    return []


def launches_of(record, what):
    return [name for kind, name, _ in record if kind == what]


def call(*kernels):
    def function(x):
        for kernel in kernels:
            RememberedKernel(kernel)[(1,)](x, x.shape[0], BLOCK=4)

    return function


def test_kernels_are_compiled_side_by_side(record):
    """The second kernel is compiled after the last one, in threads, and each once."""
    last = Kernel("last", record)
    first, second = Kernel("first", record), Kernel("second", record, waits_for=last.compiled)
    compile_ahead.compile_side_by_side(call(first, second, last, first), X)
    assert launches_of(record, "compile") == ["first", "last", "second"]
    assert launches_of(record, "launch") == ["first", "second", "last", "first"]
    own = threading.get_ident()
    assert [thread == own for kind, _, thread in record if kind == "compile"] == [True, False, False]
    # Triton's keys depend on the order in which they are computed first.
    assert record[:3] == [("key", name, own) for name in ("first", "second", "last")]
    record.clear()
    compile_ahead.compile_side_by_side(call(first, second, last), X)
    assert launches_of(record, "compile") == []


def test_only_what_is_missing_is_compiled(record):
    kernels = [Kernel(name, record) for name in ("one", "two", "three")]
    compile_ahead.compile_side_by_side(call(kernels[0]), X)
    compile_ahead.compile_side_by_side(call(*kernels), X)
    assert sorted(launches_of(record, "compile")) == ["one", "three", "two"]
    compile_ahead.compile_side_by_side(call(*kernels), X.double())
    assert len(launches_of(record, "compile")) == 6  # six more launches for another dtype


def test_other_modes_change_nothing(record):
    """Tensors of inference, and another default device."""
    kernels = [Kernel("first", record), Kernel("second", record)]
    with torch.inference_mode():
        compile_ahead.compile_side_by_side(
            lambda x: call(*kernels)(x * x.sum(0) + torch.ones_like(x)), X.clone()
        )
    assert len(launches_of(record, "compile")) == 2
    with torch.device("meta"):
        compile_ahead.compile_side_by_side(lambda x: call(*kernels)(x + x), X.double())
    assert len(launches_of(record, "compile")) == 4


def test_failures_are_those_of_the_launch(record):
    broken, sound = Kernel("broken", record, fails=True), Kernel("sound", record)
    with pytest.raises(RuntimeError, match="no such instruction"):
        compile_ahead.compile_side_by_side(call(sound, broken), X)
    assert launches_of(record, "launch") == ["sound", "broken"]


def test_what_cannot_be_rehearsed_is_compiled_at_its_launch(record):
    kernel = Kernel("kernel", record)

    def function(x):
        assert x.sum().item() > 0
        call(kernel)(x)
        return 3

    assert compile_ahead.compile_side_by_side(function, X) == 3
    assert launches_of(record, "compile") == []
    assert launches_of(record, "launch") == ["kernel"]


def test_a_rehearsal_may_go_further(record):
    now, later = Kernel("now", record), Kernel("later", record)
    compile_ahead.compile_side_by_side(call(now), X, rehearsal=call(now, later))
    call(later)(X)  # outside, as in a backward pass; it waits for the thread
    assert sorted(launches_of(record, "compile")) == ["later", "now"]
    assert launches_of(record, "launch") == ["now", "later"]


def test_a_rehearsal_of_many_steps_ends(record, monkeypatch):
    """A call in a small workspace repeats its kernels thousands of times."""
    monkeypatch.setattr(compile_ahead, "MOST_STEPS", 7)
    often, late = Kernel("often", record), Kernel("late", record)
    function = call(*[often] * 9, late)
    assert [each.kernel for each in compile_ahead.rehearse(function, X)] == [often] * 7
    assert not in_rehearsal()
    with pytest.raises(compile_ahead.TooManySteps):
        compile_ahead.rehearse_steps(function, [placeholder_of(X)])
    compile_ahead.compile_side_by_side(function, X)
    assert launches_of(record, "compile") == ["often"]
    assert launches_of(record, "launch") == ["often"] * 9 + ["late"]


def test_nothing_is_compiled_ahead_in_a_captured_graph(record, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel = Kernel("kernel", record)
    compile_ahead.compile_side_by_side(call(kernel), X)
    assert launches_of(record, "compile") == []
    assert launches_of(record, "launch") == ["kernel"]


def test_kinds_are_those_that_triton_compiles_for():
    def kind(*arguments, **constants):
        return compile_ahead.Launch(Kernel("kernel", []), (1,), arguments, constants).kind

    memory = torch.zeros(64)
    assert kind(memory, 32, BLOCK=4) == kind(memory[4:], 48, BLOCK=4)
    unlike = [
        kind(memory, 32, BLOCK=4), kind(memory[1:], 32, BLOCK=4), kind(memory.double(), 32, BLOCK=4),
        kind(memory, 33, BLOCK=4), kind(memory, 1, BLOCK=4), kind(memory, 1 << 40, BLOCK=4),
        kind(memory, 32, BLOCK=8), kind(None, 32, BLOCK=4), kind(memory, 0.5, BLOCK=4),
    ]  # fmt: skip
    assert len(set(unlike)) == len(unlike)
    assert kind(memory, 32, BLOCK=4) == kind(placeholder_of(memory), 32, BLOCK=4)
    assert kind(memory[1:], 32, BLOCK=4) == kind(placeholder_of(memory[1:]), 32, BLOCK=4)
