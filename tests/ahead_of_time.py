"""Kernels compiled without a GPU: what the compile_kernels.py of each package and their tests share."""

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
    """What ptxas says of a kernel: registers, and bytes that a thread puts aside."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", str(path)]
        report = subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=True
        ).stderr
    numbers = {
        "registers": r"Used (\d+) registers",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    return {name: int(re.search(pattern, report)[1]) for name, pattern in numbers.items()}
