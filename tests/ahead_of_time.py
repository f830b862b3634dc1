"""Kernels compiled without a GPU: what the compile_kernels.py of each package and their tests share."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


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


def assembled(ptx: str, capability: int) -> dict[str, int]:
    """What ptxas says of a kernel: registers, and bytes that a thread puts aside. The same PTX is assembled
    once: Triton's cache, which has what it compiled itself, keeps the report, too."""
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.runtime.cache import get_cache_manager

    ptxas = get_ptxas(capability)
    key = hashlib.sha256(f"{ptxas.path} {ptxas.version}\n{ptx}".encode()).hexdigest()
    cache, name = get_cache_manager(key), "ptxas.txt"
    if not (kept := cache.get_file(name)):
        kept = cache.put(_report(ptxas.path, ptx), name, binary=False)
    report = Path(kept).read_text()
    numbers = {
        "registers": r"Used (\d+) registers",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    return {name: int(re.search(pattern, report)[1]) for name, pattern in numbers.items()}


def _report(ptxas: str, ptx: str) -> str:
    architecture = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={architecture}", str(path), "-o", f"{folder}/kernel.cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
