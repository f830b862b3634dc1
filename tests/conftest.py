import atexit
import functools
import gc
import importlib.util
import os
import signal
import sys
import threading

# The products are small: handing them to threads costs more than it saves, a hundred times on a
# busy machine. Read when NumPy, whose products the interpreter takes, is imported; and by the
# processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import pytest
import torch

if not torch.cuda.is_available():  # read when triton is imported, which torch does not do by itself
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The code that Inductor generates around our operators is plain C++. Without vectors, torch need
# not try a compiler on them, which takes 6 s, and a second more per graph. The variable is read
# when torch._dynamo is imported.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
import torch._dynamo  # makes a table of torch's functions, before some are replaced below

from tests.support.cards import NEEDS_CUDA
from tests.support.compiler import leave_out_reports
from tests.support.cuda_context import give_autograd_a_context
from tests.support.extended import mark_extended
from tests.support.seeds import seed_the_cpu_alone

torch.set_num_threads(1)
leave_out_reports()
if not torch.cuda.is_available():
    seed_the_cpu_alone()

# Ranks and other processes that a test starts send each other thousands of short messages. If they
# share a processor, a message need not wake another one, which takes a virtual machine long.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    processors = sorted(os.sched_getaffinity(0))
    if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) == len(processors):
        os.sched_setaffinity(0, {processors[int(worker.removeprefix("gw"))]})

# The garbage collector goes through all that lives, most of which is imported or a test, and stays.
gc.disable()
# By default the collector goes through all objects that tests leave after each 700 new ones, which
# takes a twenty-fifth of their time.
gc.set_threshold(10_000)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    mark_extended(items)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    # Otherwise extensions report the remaining objects as a leak. This comes last, as pytest
    # collects several times at its end.
    atexit.register(gc.unfreeze)


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from tests.support.interpreter import leave_out_what_has_no_effect, take_strides_in_bytes

    leave_out_what_has_no_effect()
    take_strides_in_bytes()

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])
ON_CUDA_ALONE = pytest.mark.parametrize("device", [CUDA])  # for a test that asserts nothing on a CPU


# A shell that starts tests in the background ignores interrupts, and whatever they start would
# inherit that.
if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    return request.param


@pytest.fixture(autouse=True, scope="module")
def _nothing_collected_twice():
    """What a module imports and keeps is frozen when it ends: later collections skip it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _autograd_has_a_context():
    if torch.cuda.is_available():
        give_autograd_a_context()


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck(monkeypatch):
    from tests.support.unwritten import poison  # torch is imported by it

    poison(monkeypatch.setattr)


def _forgetting(change):
    """Let a method of MonkeyPatch forget the plans: they depend on what tests replace."""

    @functools.wraps(change)
    def run(*arguments, **options):
        change(*arguments, **options)
        for name in ("linear_cross_entropy.planning", "attention"):
            remembered = sys.modules.get(f"lowtide.ops.{name}.remembered")
            if remembered is not None:
                remembered.forget()

    return run


for name in ("setattr", "undo"):
    setattr(pytest.MonkeyPatch, name, _forgetting(getattr(pytest.MonkeyPatch, name)))


@pytest.fixture
def plain_environment():
    """For a fresh process: this one's, without Triton's interpreter."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
