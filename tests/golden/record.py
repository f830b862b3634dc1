"""Run calls, describe what they return, and compare two descriptions."""

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import multiprocessing
import platform
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.golden import derivatives, inside
from tests.golden.calls import CALLS, Call
from tests.golden.given import Given, Outputs

Description = dict[str, Any]


def prepare(device: str) -> None:
    torch.set_num_threads(1)
    if device == "cpu" and importlib.util.find_spec("triton"):
        inside.quicken_interpreter()
        # The interpreter computes masked numbers, too, with NumPy, which warns of inf - inf.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    if device == "cuda":  # otherwise torch warns if the first product that it differentiates is cuBLAS's
        one = torch.ones((), device="cuda", requires_grad=True)
        torch.autograd.grad(one.exp(), one)


def environment(device: str) -> Description:
    """All that bits depend on beside the package."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
    return {"device": device, "name": name, "torch": torch.__version__, "triton": _triton_version()}


def describe_call(name: str, device: str) -> Description:
    """The bits of what a call returns, the engines that it took, and the bytes that it held at
    once; or why there is nothing to record: it fails, or gives other bits each time."""
    try:
        return _describe_call(name, device)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _describe_call(name: str, device: str) -> Description:
    call = CALLS[name]
    if call.derivative == "compiled":  # earlier compilations decide which sizes become symbols
        torch.compiler.reset()
    given = Given(name, device)
    function = call.make(given)
    derivative = getattr(derivatives, call.derivative)

    def run() -> Outputs:
        torch.manual_seed(0)  # the seed of dropout
        with _surroundings(call, device):
            return derivative(function, given.leaves)

    with inside.chosen_engines() as engines:
        first = describe_outputs(run())
    gc.collect()
    with inside.peak_memory(device) as peak:
        again = run()
    if (second := describe_outputs(again)) != first:
        different = [key for key in first if first[key] != second.get(key)]
        raise ArithmeticError(f"other bits the second time, in {', '.join(different)}")
    return {"engines": sorted(engines), "peak bytes": peak.bytes, "outputs": first}


def describe_outputs(outputs: Outputs) -> Description:
    return {name: _describe(tensor) for name, tensor in outputs.items()}


def record(names: Sequence[str], device: str, jobs: int = 1) -> Description:
    """Description by the name of the call; `jobs` processes share the calls."""
    if jobs == 1:
        prepare(device)
        return {name: describe_call(name, device) for name in names}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=prepare, initargs=(device,)) as pool:
        return dict(zip(names, pool.map(describe_call, names, [device] * len(names))))


def differences(before: Description, after: Description) -> list[str]:
    """What differs between two records of calls, a line each."""
    lines = [f"{name}: no longer in the table" for name in before if name not in after]
    lines += [f"{name}: new in the table" for name in after if name not in before]
    for name in before:
        for path, old, new in _pairs(before[name], after.get(name, before[name])):
            lines.append(f"{name}: {path} was {old}, is {new}")
    return lines


def _pairs(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each leaf of two trees of dicts that differs, with its path."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _pairs(old.get(key), new.get(key), f"{path}, {key}" if path else key)
    elif old != new:
        yield path, old, new


def _describe(tensor: Tensor) -> Description:
    plain = tensor.detach().cpu().contiguous()
    numbers = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())  #
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "sha256": hashlib.sha256(numbers).hexdigest(),
    }


@contextlib.contextmanager
def _surroundings(call: Call, device: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if call.as_on_a_card:
            stack.enter_context(inside.as_on_a_card())
        if call.deterministic:
            stack.enter_context(derivatives.deterministic())
        if call.autocast is not None:
            stack.enter_context(torch.autocast(device, call.autocast))
        yield


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return str(triton.__version__)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
