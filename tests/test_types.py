"""What type checkers know of the public functions: precise results, and options by name.

mypy reads a strict program of a user's; so does pyright, where it is installed.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

# The part of torch that the public signatures use; mypy takes a minute to read the rest.
TORCH = """
from typing import Any, Callable
from . import nn
class Generator: ...
class device: ...
class dtype: ...
class Size(tuple[int, ...]): ...
class Tensor:
    def sum(self) -> Tensor: ...
"""
NN = """
from typing import Any, Callable
class Module:
    __call__: Callable[..., Any]
    weight: Any
class Linear(Module): ...
"""
ACCEPTED = """
from typing import Any, Callable
from typing_extensions import assert_type
from torch import Tensor
import lowtide
from lowtide import attn_bias, distillation, losses
from lowtide.deferred import Deferral
from torch import nn

def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.sum()

def results(x: Tensor, w: Tensor, t: Tensor, head: Callable[[Tensor], Tensor], flag: bool) -> None:
    assert_type(lowtide.linear_cross_entropy(x, w, t, reduction="none", backend="torch"), Tensor)
    assert_type(lowtide.LinearCrossEntropyLoss(4, 5)(x, t), Tensor)
    assert_type(lowtide.linear_log_probs(x, w, t), lowtide.LogProbs)
    assert_type(lowtide.linear_log_probs(x, w, t).log_prob, Tensor)
    log_prob, entropy, logsumexp, argmax = lowtide.linear_log_probs(x, w, t)
    assert_type((log_prob, entropy, logsumexp, argmax), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(lowtide.chunked_loss(loss_fn, head, x, t, chunk_size=4, mode="recompute"), Tensor)
    assert_type(lowtide.chunked_loss(loss_fn, head, x, t, has_aux=False), Tensor)
    assert_type(lowtide.chunked_loss(loss_fn, head, x, t, has_aux=True), tuple[Tensor, dict[str, Any]])
    either = lowtide.chunked_loss(loss_fn, head, (x, x), t, has_aux=flag)
    assert_type(either, Tensor | tuple[Tensor, dict[str, Any]])
    assert_type(lowtide.chunked_loss(loss_fn, chunk_size=4)(head, x, t), Tensor)
    assert_type(lowtide.chunked_loss(chunk_size=4)(loss_fn)(head, x, t), Tensor)
    assert_type(lowtide.chunked_loss(has_aux=True)(loss_fn)(head, x, t), tuple[Tensor, dict[str, Any]])
    assert_type(lowtide.memory_efficient_attention(x, x, x, backend="sdpa"), Tensor)
    assert_type(lowtide.memory_efficient_attention_with_lse(x, x, x), tuple[Tensor, Tensor])
    assert_type(lowtide.scaled_dot_product_attention(x, x, x), Tensor)
    assert_type(distillation.forward_kl(x, w, x, w, reduction="sum"), Tensor)
    assert_type(distillation.reverse_kl(x, w, x, w), Tensor)
    assert_type(distillation.jensen_shannon(x, w, x, w), Tensor)
    assert_type(losses.dpo(x, x, x, x, reduction="none"), Tensor)
    assert_type(losses.grpo(x, None, x, x, loss_type="dapo"), Tensor)
    assert_type(losses.sequence_log_probs(x, w, t, softcap=30.0), Tensor)
    assert_type(losses.info_nce(x, x, logit_scale=1.0, backend="triton"), Tensor)
    assert_type(losses.z_loss(x, w, t, backend="reference"), Tensor)
    part = lowtide.memory_efficient_attention_with_lse(x, x, x, attn_bias.LowerTriangularMask())
    assert_type(lowtide.merge_attentions([part, part]), tuple[Tensor, Tensor])
    blocks = attn_bias.BlockDiagonalMask.from_seqlens([3, 4])
    assert_type(blocks, attn_bias.BlockDiagonalMask)
    assert_type(blocks.make_causal(), attn_bias.BlockDiagonalCausalMask)

def contexts(model: nn.Module) -> None:
    with lowtide.defer_logits(model) as deferral:
        assert_type(deferral, Deferral)
        assert_type(deferral.materialized, dict[str, int])
    with lowtide.peak_memory("cpu") as peak:
        assert_type(peak.bytes, int)

@lowtide.chunked_loss(chunk_size=4)
def decorated(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.sum()

def of_decorated(x: Tensor, t: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    assert_type(decorated(head, x, t), Tensor)
"""
REFUSED = {
    'lowtide.linear_cross_entropy(x, w, t, backend="cuda")': "backend",
    'lowtide.linear_cross_entropy(x, w, t, reduction="average")': "reduction",
    'lowtide.linear_cross_entropy(x, w, t, backend="sdpa")': "backend",
    'lowtide.LinearCrossEntropyLoss(4, 5, backend="cuda")': "backend",
    'lowtide.linear_log_probs(x, w, t, backend="cuda")': "backend",
    'lowtide.memory_efficient_attention(x, x, x, backend="cuda")': "backend",
    'lowtide.memory_efficient_attention_with_lse(x, x, x, backend="cuda")': "backend",
    'lowtide.losses.info_nce(x, x, logit_scale=1.0, backend="cuda")': "backend",
    'lowtide.losses.contrastive(x, x, logit_scale=1.0, backend="cuda")': "backend",
    'lowtide.losses.z_loss(x, w, t, backend="cuda")': "backend",
    'lowtide.distillation.forward_kl(x, w, x, w, reduction="average")': "reduction",
    'lowtide.chunked_loss(print, print, x, mode="fast")': "No overload",
    "lowtide.linear_log_probs(x, w, t).log_probs": "log_probs",
    "lowtide.losses.sequence_log_probs(x, w, t, z_loss=1.0)": "z_loss",
}
START = """from torch import Tensor
import lowtide, lowtide.losses, lowtide.distillation
def calls(x: Tensor, w: Tensor, t: Tensor) -> None:
"""
CALLS = START + "".join(f"    {call}\n" for call in REFUSED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's, with what mypy and pyright read of torch and lowtide."""
    folder = tmp_path_factory.mktemp("types")
    package = Path(lowtide.__file__).parents[1]
    # mypy finds what is installed by itself, and takes no path to it.
    paths = [folder] if package.name == "site-packages" else [folder, package]
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.pyi").write_text(TORCH)
    (folder / "torch" / "nn.pyi").write_text(NN)
    (folder / "mypy.ini").write_text(
        f"[mypy]\npython_version = 3.10\nstrict = True\nmypy_path = {':'.join(map(str, paths))}\n"
        "follow_imports = silent\nignore_missing_imports = true\n"
        "[mypy-torch.*,numpy.*,triton.*,transformers.*]\nfollow_imports = skip\n"
    )
    settings = {"include": ["program.py"], "extraPaths": [str(folder), str(package)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings | {"pythonVersion": "3.10"}))
    return folder


def mypy(folder):
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found = [line.removeprefix("program.py:") for line in done.stdout.splitlines() if ": error:" in line]
    assert done.returncode == bool(found), done.stdout + done.stderr  # otherwise it has not read the program
    return found


def pyright(folder):
    if shutil.which("pyright") is None:
        pytest.skip("pyright is not installed")
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return [
        f"{found['range']['start']['line'] + 1}: {found['severity']}: {found['message']}"
        for found in json.loads(done.stdout)["generalDiagnostics"]
        if found["severity"] == "error"
    ]


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_results(folder, checker):
    (folder / "program.py").write_text(ACCEPTED)
    assert checker(folder) == []


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_options(folder, checker):
    (folder / "program.py").write_text(CALLS)
    found = checker(folder)
    for line, (call, message) in enumerate(REFUSED.items(), start=4):
        own = [each for each in found if each.startswith(f"{line}:")]
        assert own, (call, found)
        assert checker is pyright or (len(own) == 1 and message in own[0]), own
    assert {int(each.partition(":")[0]) for each in found} == {*range(4, 4 + len(REFUSED))}
