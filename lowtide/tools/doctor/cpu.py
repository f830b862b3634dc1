"""Report a CPU's bfloat16 units, a compiler for them, and how its threads wait."""

import os
import shlex

import torch

from lowtide.core.bfloat16_units import gemm
from lowtide.core.bfloat16_units.compiled_library import NoCompilerError, NotLoadedError, find_compiler, run

UNITS = {"AVX512-BF16": "_is_avx512_bf16_supported", "AMX": "_is_amx_tile_supported"}


def cpu() -> dict[str, str]:
    """Return each fact by its name, in the order in which they are shown."""
    reason = gemm.against()
    return {
        "bfloat16 units": _units(),
        "C++ compiler": _compiler(),
        "bfloat16 products": "with these units, compiled" if reason is None else f"in float32: {reason}",
        "threads": f"{torch.get_num_threads()} on {os.cpu_count()} cores{_load()}",
        "OMP_WAIT_POLICY": _waiting(),
    }


def _units() -> str:
    """Return the units that torch finds, by functions private to torch, whose names may change."""
    known = {name: getattr(torch.cpu, function, None) for name, function in UNITS.items()}
    if not any(known.values()):
        return "unknown to this torch"
    return ", ".join(name for name, supported in known.items() if supported and supported()) or "none"


def _compiler() -> str:
    try:
        command = find_compiler()
        version = run([*command, "--version"]).decode(errors="replace")
    except NoCompilerError as problem:
        return f"{problem}; install g++, or name one in CXX"
    except NotLoadedError as problem:
        return str(problem)
    first, *_ = version.splitlines() or [""]
    return f"{shlex.join(command)}: {first}"


def _load() -> str:
    """Return how many processes want to run, averaged over the last minute."""
    if not hasattr(os, "getloadavg"):
        return ""
    return f", load {os.getloadavg()[0]:.1f}"


def _waiting() -> str:
    if torch.get_num_threads() == 1:
        return "does not matter: there is one thread"
    policy = os.environ.get("OMP_WAIT_POLICY", "")
    if policy.lower() == "passive":
        return "passive: threads that wait leave their cores to others"
    said = f"{policy}: " if policy else "not set: "
    return (
        f"{said}threads that wait spin, and on a machine with other work a step can take 30 times as long; "
        "there, start Python with OMP_WAIT_POLICY=passive"
    )
