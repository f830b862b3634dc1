"""Kernels compiled without a GPU: what each package's compile_kernels.py and their tests share.

`make test-all` leaves out what other builds cover, as far as that goes: of each kernel and
capability it has one with much switched on, and of the most used the plain one; not each subset of
options or size of tiles. What it cannot see is that one of those alone puts more aside, or needs
more shared memory. All builds take three times as long, minutes of a processor. Each
compile_kernels.py names what is left out, by capability; when a kernel, its tiles or Triton change,
`make test-builds` runs that too (decision 0052). `make test` has a build of each kernel but those
that take a second or more: the first that is for Hopper, or the first for other cards where there
is none.
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cases(builds, left_out, slow=()):
    """A test for each build and capability, by name. No capability leaves a kernel out.

    slow: kernels that `make test` leaves to `make test-extended`, each of whose builds takes long.
    """
    import pytest  # the processes that build have no use for it

    every = [(name, capability) for name, build in builds.items() for capability in build.targets]
    left = {(name, capability) for capability, names in left_out.items() for name in names}
    assert left <= set(every)
    kernels = {(builds[name].kernel, capability) for name, capability in every}
    assert kernels == {(builds[name].kernel, capability) for name, capability in set(every) - left}
    assert {*slow} <= {kernel for kernel, _ in kernels}
    kept = set(every) - left
    of_hopper_first = sorted((each for each in every if each in kept), key=lambda each: each[1] != 90)
    first = {builds[name].kernel: (name, capability) for name, capability in reversed(of_hopper_first)}

    def marks(name: str, capability: int) -> tuple[pytest.MarkDecorator, ...]:
        if (name, capability) in left:
            return (pytest.mark.every_build,)
        quick = first[builds[name].kernel] == (name, capability) and builds[name].kernel not in slow
        return () if quick else (pytest.mark.extended,)

    return [pytest.param(*each, marks=marks(*each)) for each in every]


def compile_all(module, request):
    """What `print_all` prints in a compile_kernels, by name and capability, of tests to be run."""
    tests = [
        item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    asked = [_label(**item.callspec.params) for item in tests]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", module, *asked],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]
    return {(result["name"], result["capability"]): result for result in results}


def _label(name: str, capability: int) -> str:
    return f"{name}: {capability}"


def print_all(builds: dict[str, Any], resources: Callable[[str, Any, int], dict[str, Any]]) -> None:
    """One JSON object a line: of the builds that the command line names, or of all."""
    gc.disable()  # a tenth of the time, for nothing: what a build leaves holds no cycles to speak of
    asked = sys.argv[1:]
    for name, build in builds.items():
        for capability in build.targets:
            if asked and _label(name, capability) not in asked:
                continue
            try:
                result = resources(name, build, capability)
            except Exception as error:  # said in its test, so that one kernel does not hide the others
                result = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"name": name, "capability": capability} | result), flush=True)


def compiled(
    kernel: Any, arguments: dict[str, Any], capability: int | str, options: dict[str, int]
) -> tuple[dict[str, int], str]:
    """What Triton and the assembler say of a kernel, and its TTGIR. capability: that of an NVIDIA
    card, or the name of AMD's architecture. arguments: by name, a Triton type, the value of a
    constexpr (None: a pointer that is not there), or a tuple of those. A number of the type "i32?"
    is not known to be divisible by 16, as the others are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from lowtide.core.kernels.launch import RememberedKernel

    kernel = kernel.kernel if isinstance(kernel, RememberedKernel) else kernel
    constants: dict[tuple[int, ...], Any] = {}
    aligned: list[tuple[int, ...]] = []

    def place(path: tuple[int, ...], value: Any) -> Any:
        if kernel.is_gluon() and isinstance(value, str) and value.startswith("tensordesc"):
            return _with_layout(value)
        if isinstance(value, tuple):
            return tuple(place((*path, at), each) for at, each in enumerate(value))
        if not isinstance(value, str) or not re.match(r"[*if]|tensordesc", value):
            constants[path] = value
            return "constexpr"
        if value[0] in "*i" and not value.endswith("?"):
            aligned.append(path)  # Triton specialises these where they are multiples of 16: V, D, strides
        return value.removesuffix("?")

    signature = {name: place((at,), arguments[name]) for at, name in enumerate(kernel.arg_names)}
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature=signature, constexprs=constants, attrs=attributes)
    if isinstance(capability, str):
        # Remove the hook of an earlier build for NVIDIA.
        triton.knobs.runtime.add_stages_inspection_hook = None
        built = triton.compile(source, target=GPUTarget("hip", capability, 64), options=options)
        assembly = built.asm["amdgcn"]  # Bytes, where it was read from Triton's cache.
        numbers = _numbers_of_amd(assembly.decode() if isinstance(assembly, bytes) else assembly)
    else:
        triton.knobs.runtime.add_stages_inspection_hook = _assemble_ourselves
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        numbers = built.metadata.assembled
    return {"shared": built.metadata.shared, **numbers}, built.asm["ttgir"]


def _numbers_of_amd(assembly: str) -> dict[str, int]:
    """Registers are a lane's, of vectors; one that is spilt is stored and loaded, 4 bytes each."""
    registers, spilt = (
        int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1]) for name in ("vgpr_count", "vgpr_spill_count")
    )
    return {"registers": registers, "spill_stores": 4 * spilt, "spill_loads": 4 * spilt}


def _with_layout(tile: str) -> str:
    """Of a kernel in Gluon, the type of a tile says how it lies in shared memory."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.language import str_to_ty

    dtype, rows, columns = re.fullmatch(r"tensordesc<(\w+)\[(\d+), (\d+)\]>", tile).groups()
    layout = NVMMASharedLayout.get_default_for([int(rows), int(columns)], str_to_ty(dtype, None))
    return f"{tile[:-1]},{layout!r}>"


def _assemble_ourselves(*arguments: Any) -> tuple[str, str] | None:
    """Of Triton's stages, the last, so that ptxas runs once and says what it does: Triton keeps
    that, too, in its cache. Without arguments, Triton asks what to add to the keys there."""
    if not arguments:
        return "assembled", "assembled"
    _, stages, _, _, capability = arguments
    stages["cubin"] = lambda ptx, metadata: _assemble(ptx, metadata, capability)
    return None


def _assemble(ptx: str, metadata: dict[str, Any], capability: int) -> bytes:
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        path, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        path.write_text(ptx)
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={architecture}",
            str(path),
            "-o",
            str(cubin),
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        numbers = {
            "registers": r"Used (\d+) registers",
            "spill_stores": r"(\d+) bytes spill stores",
            "spill_loads": r"(\d+) bytes spill loads",
        }
        metadata["assembled"] = {name: int(re.search(number, report)[1]) for name, number in numbers.items()}
        return cubin.read_bytes()
