"""A private function of torch that a release lacks: the slower way, with the same results."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowtide.core import torch_private
from tests.support.graphs import needs_tracing

NAMES = re.findall(r'_find\("([\w.]+)"\)', Path(torch_private.__file__).read_text())
# What each name is looked up for; torch needs them itself, so they are back once lowtide is imported.
PROGRAM = """
import sys
import torch
import torch.nn.functional as F

kept = []
for path in sys.argv[1:]:
    *owners, name = path.split(".")
    owner = torch
    for each in owners:
        owner = getattr(owner, each)
    kept.append((owner, name, getattr(owner, name)))
    delattr(owner, name)
import lowtide
for owner, name, value in kept:
    setattr(owner, name, value)

torch.manual_seed(0)
x, w = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (12, 20))
target = torch.randint(20, (12,))


def same(found, truth, *tensors, again=True):
    torch.testing.assert_close(found, truth)
    for retain in (True, False) if again else (False,):
        ours = torch.autograd.grad(3 * found.sum(), tensors, retain_graph=retain)
        torch.testing.assert_close(ours, torch.autograd.grad(3 * truth.sum(), tensors, retain_graph=retain))


logits = x @ w.t()
for reduction in ("mean", "none"):
    loss = lowtide.linear_cross_entropy(x, w, target, reduction=reduction)
    same(loss, F.cross_entropy(logits, target, reduction=reduction), x, w)
    logits = x @ w.t()
found = lowtide.linear_log_probs(x, w, target)
same(found.log_prob, logits.log_softmax(-1).gather(1, target[:, None])[:, 0], x, w)


def loss_fn(z, y):
    return F.cross_entropy(z, y, reduction="sum")


head = torch.nn.Linear(8, 20, bias=False, dtype=torch.float64)
head.weight = torch.nn.Parameter(w.detach().clone())
for mode in ("gradient_in_forward", "recompute"):
    loss = lowtide.chunked_loss(loss_fn, head, x, target, chunk_size=5, mode=mode)
    same(loss, F.cross_entropy(F.linear(x, head.weight), target, reduction="sum"), x, head.weight)
q, k, v = (torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
found = lowtide.memory_efficient_attention(q, k, v)
truth = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
same(found, truth, q, k, v)
found = lowtide.memory_efficient_attention(q, k, v, backend="torch")
truth = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2)
same(found, truth, q, k, v)
with lowtide.defer_logits(head, head=head):
    loss = F.cross_entropy(head(x), target)
same(loss, F.cross_entropy(F.linear(x, head.weight), target), x, head.weight)
once = torch.autograd.grad(lowtide.linear_cross_entropy(x, w, target), x, create_graph=True)[0]
exact = torch.autograd.grad(F.cross_entropy(x @ w.t(), target), x, create_graph=True)[0]
same(once.square(), exact.square(), x, w, again=False)
try:
    found = torch.func.grad(lambda x: lowtide.linear_cross_entropy(x, w, target))(x)
    torch.testing.assert_close(found, torch.autograd.grad(F.cross_entropy(x @ w.t(), target), x)[0])
except RuntimeError as error:  # Refused, with what to do.
    assert "upgrade lowtide" in str(error), error
print("right")
"""


def run(*names):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"


def test_names_are_looked_up():
    assert len(NAMES) == 15
    assert all(torch_private._find(name) is not None for name in NAMES)
    assert torch_private._find("_C._functorch.no_such_function") is None
    assert torch_private._find("no_such_module.function") is None


@needs_tracing  # without it lowtide imports torch.compile, which needs these names itself
def test_all_are_missing():
    run(*NAMES)


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_one_is_missing(name):
    run(name)


def test_no_other_private_name_in_the_operators():
    """Those of functorch that only a wrapped tensor needs come after `is_wrapped`, which knows."""
    root = Path(torch_private.__file__).parents[1]
    known = {"get_unwrapped", "maybe_get_bdim"}
    for folder in ("core", "ops"):
        for path in (root / folder).rglob("*.py"):
            if path.name != "torch_private.py":
                found = set(re.findall(r"\btorch\._C\.(?:\w+\.)*(\w+)", path.read_text()))
                assert found <= known, path


def test_graphs_break_where_torch_traces_no_properties(monkeypatch):
    """The call runs eagerly, once for each run of the graph."""
    monkeypatch.setattr(torch_private, "TRACES_PROPERTIES", False)
    eager = []

    @torch_private.breaks_old_graphs
    def call(x):
        eager.append(not torch.compiler.is_compiling())
        return x.exp()

    def step(x):
        return 2 * call(x + 1)

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(step, backend="eager")(x), 2 * (x + 1).exp())
    assert eager == [True]
    torch.compiler.reset()
    with pytest.raises(Exception, match=torch_private.UNTRACED):
        torch.compile(step, backend="eager", fullgraph=True)(x)
    monkeypatch.setattr(torch_private, "TRACES_PROPERTIES", True)
    assert torch_private.breaks_old_graphs(step) is step
