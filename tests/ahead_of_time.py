"""Kernels compiled without a GPU: what the compile_kernels.py of each package and their tests share."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def compile_all(module):
    """What the `main` of a compile_kernels prints, by name and capability."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", module],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in run.stdout.splitlines()]
    return {(result["name"], result["capability"]): result for result in results}


def compiled(
    kernel: Any, arguments: dict[str, Any], capability: int, options: dict[str, int]
) -> tuple[dict[str, int], str]:
    """What Triton and ptxas say of a kernel, and its TTGIR. arguments: by name, a Triton type, the value of a
    constexpr (None: a pointer that is not there), or a tuple of those."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants: dict[tuple[int, ...], Any] = {}
    aligned: list[tuple[int, ...]] = []

    def place(path: tuple[int, ...], value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(place((*path, at), each) for at, each in enumerate(value))
        if not isinstance(value, str) or not re.match(r"[*if]|tensordesc", value):
            constants[path] = value
            return "constexpr"
        if value[0] in "*i":
            aligned.append(path)  # as Triton specialises them where they are: V, D, strides
        return value

    signature = {name: place((at,), arguments[name]) for at, name in enumerate(kernel.arg_names)}
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    triton.knobs.runtime.add_stages_inspection_hook = _assemble_ourselves
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": built.metadata.shared, **built.metadata.assembled}, built.asm["ttgir"]


def _assemble_ourselves(*arguments: Any) -> tuple[str, str] | None:
    """Of Triton's stages, the last, so that ptxas runs once and says what it does: Triton keeps that, too, in
    its cache. Without arguments, Triton asks what to add to the keys there."""
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
