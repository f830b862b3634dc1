"""Each example that defers logits runs as its docstring says: the same loss, less memory."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = {  # what each needs, and the dtype of its products
    "defer_logits": ([], torch.float32),
    "defer_trainer": (["transformers", "accelerate"], torch.bfloat16),
    "defer_peft": (["transformers", "peft"], torch.float32),
    "defer_accelerate": (["accelerate"], torch.bfloat16),
    "defer_lightning": (["lightning"], torch.bfloat16),
    "trl_sft": (["trl"], torch.float32),
    "trl_dpo": (["trl"], torch.float32),
    "trl_grpo": (["trl"], torch.float32),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_prints_the_same_loss_and_less_memory(name, plain_environment):
    needs, dtype = EXAMPLES[name]
    for each in needs:
        if importlib.util.find_spec(each) is None:
            pytest.skip(f"needs {each}")
    run = subprocess.run(
        [sys.executable, f"examples/{name}.py"],
        cwd=ROOT,
        env=plain_environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()[-2:]
    assert [line.split(":")[0] for line in lines] == ["as it is", "deferred"]
    (loss, peak), (deferred_loss, deferred_peak) = (
        (float(re.search(r"loss (-?[\d.]+)", line)[1]), int(re.search(r"(\d+) MiB", line)[1]))
        for line in lines
    )
    printed = 1e-5
    assert abs(deferred_loss - loss) <= 8 * torch.finfo(dtype).eps * abs(loss) + printed
    assert deferred_peak < 0.6 * peak
