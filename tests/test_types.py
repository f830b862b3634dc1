"""What a type checker knows of the public functions: precise results, and options by name."""

import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

# Of torch, what the public signatures are made of: mypy takes a minute to read the rest.
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
class Linear(Module): ...
"""
ACCEPTED = """
from typing import Any, Callable
from typing_extensions import assert_type
from torch import Tensor
import lowtide
from lowtide import distillation, losses

def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.sum()

def results(x: Tensor, w: Tensor, t: Tensor, head: Callable[[Tensor], Tensor], flag: bool) -> None:
    assert_type(lowtide.linear_cross_entropy(x, w, t, reduction="none", backend="torch"), Tensor)
    assert_type(lowtide.LinearCrossEntropyLoss(4, 5)(x, t), Tensor)
    assert_type(lowtide.linear_log_probs(x, w, t), lowtide.LogProbs)
    assert_type(lowtide.linear_log_probs(x, w, t).log_prob, Tensor)
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
    assert_type(losses.info_nce(x, x, logit_scale=1.0, backend="triton"), Tensor)
    assert_type(losses.z_loss(x, w, t, backend="reference"), Tensor)

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
}


@pytest.fixture(scope="module")
def check_types(tmp_path_factory):
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("types")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.pyi").write_text(TORCH)
    (folder / "torch" / "nn.pyi").write_text(NN)
    (folder / "mypy.ini").write_text(
        f"[mypy]\npython_version = 3.10\nmypy_path = {folder}:{Path(lowtide.__file__).parents[1]}\n"
        "follow_imports = silent\nignore_missing_imports = true\n"
        "[mypy-torch.*,numpy.*,triton.*,transformers.*]\nfollow_imports = skip\n"
    )

    def check(program):
        (folder / "program.py").write_text(program)
        mypy = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "program.py"]
        return subprocess.run(mypy, cwd=folder, capture_output=True, text=True, check=False).stdout

    return check


def test_results(check_types):
    found = check_types(ACCEPTED)
    assert "Success" in found, found


def test_options(check_types):
    lines = [f"    {call}" for call in REFUSED]
    start = "from torch import Tensor\nimport lowtide, lowtide.losses, lowtide.distillation\n"
    head = "def calls(x: Tensor, w: Tensor, t: Tensor) -> None:\n"
    found = check_types(start + head + "\n".join(lines)).splitlines()
    for line, (call, message) in enumerate(REFUSED.items(), start=4):
        own = [each for each in found if each.startswith(f"program.py:{line}: error")]
        assert len(own) == 1, (call, found)
        assert message in own[0], own
