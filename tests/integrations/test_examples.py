"""Each example that defers logits runs as its docstring says: the same loss, less memory, in no
time. What their page says of them is what they print."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = {  # what each example needs, and the dtype of its products
    "defer_logits": ([], torch.float32),
    "defer_transformers": (["transformers"], torch.float32),
    "defer_trainer": (["transformers", "accelerate"], torch.bfloat16),
    "defer_peft": (["transformers", "peft"], torch.float32),
    "defer_accelerate": (["accelerate"], torch.bfloat16),
    "defer_lightning": (["lightning"], torch.bfloat16),
    "trl_sft": (["trl"], torch.float32),
    "trl_dpo": (["trl"], torch.float32),
    "trl_grpo": (["trl"], torch.float32),
}
SLOW_IMPORTS = {  # before an example is forked off
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "peft": ["peft"],
    "transformers": ["transformers.models.llama.modeling_llama", "transformers.trainer"],
    "trl": ["trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer"],
}
OF_TORCH_ALONE = [name for name, (needs, _) in EXAMPLES.items() if not needs]
OF_PACKAGES = [name for name in EXAMPLES if name not in OF_TORCH_ALONE]  # their imports take 20 s
PAGE = (ROOT / "docs" / "examples" / "index.md").read_text()
NUMBERS = r"loss (-?[\d.]+),.* peak memory (?:of a step )?(\d+) MiB"


def installed(name):
    return importlib.util.find_spec(name) is not None


@pytest.fixture(scope="module")
def runner():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.run_examples"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.mark.extended
@pytest.mark.parametrize("name", [*OF_TORCH_ALONE, *OF_PACKAGES])
def test_example_prints_same_loss_less_memory(name, runner):
    needs, dtype = EXAMPLES[name]
    for each in needs:
        if not installed(each):
            pytest.skip(f"needs {each}")
    print(name, *(module for each in needs for module in SLOW_IMPORTS[each]), file=runner.stdin, flush=True)
    found = json.loads(runner.stdout.readline())
    assert found["status"] == 0, found["errors"]
    lines = found["out"].splitlines()[-2:]
    assert [line.split(":")[0] for line in lines] == ["as it is", "deferred"]
    printed = [re.search(NUMBERS, line).groups() for line in lines]
    loss, deferred_loss = (float(each) for each, _ in printed)
    peaks = [int(each) for _, each in printed]
    last_digit = 1e-5
    assert abs(deferred_loss - loss) <= 8 * torch.finfo(dtype).eps * abs(loss) + last_digit
    assert peaks[1] < 0.6 * peaks[0]
    assert found["seconds"] < 60, "of a processor"
    told = re.search(rf"\| `{name}\.py`.* \| (\d+) MiB \| (\d+) MiB \|", PAGE)
    # Other versions of the libraries hold a little more or less.
    assert [int(each) for each in told.groups()] == pytest.approx(peaks, rel=0.1)


def test_examples_all_listed():
    there = {
        path.stem for path in (ROOT / "examples").glob("*.py") if path.stem.startswith(("defer_", "trl_"))
    }
    assert there - {"trl_common"} == set(EXAMPLES)
