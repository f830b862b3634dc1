"""`import lowtide` loads nothing but lowtide and Python's own modules beside what torch has loaded.

Triton alone takes longer to load than all of lowtide; torch.utils.flop_counter imports it.
"""

import subprocess
import sys

PROGRAM = """
import importlib.util, sys
import torch
before = set(sys.modules)
import lowtide
new = {name for name in set(sys.modules) - before if name.split(".")[0] not in sys.stdlib_module_names}
print(sorted(name for name in new if name.split(".")[0] != "lowtide"))

assert importlib.util.find_spec("torch.utils.flop_counter")
from torch.utils.flop_counter import FlopCounterMode
x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
query = torch.randn(1, 6, 2, 8)
with FlopCounterMode(display=False) as counter:
    lowtide.linear_cross_entropy(x, w, torch.tensor([0, 1, 2]))
    lowtide.memory_efficient_attention(query, query, query, torch.zeros(1, 2, 6, 6))
    lowtide.distillation.forward_kl(x, w, x.detach(), w.detach())
print({str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()})
"""
FLOPS = {
    "lowtide.linear_cross_entropy": 3 * 2 * 3 * 4 * 5,
    "lowtide.attention": 2 * 2 * 6 * 6 * (8 + 8),
    "lowtide.distillation": 4 * 2 * 3 * 4 * 5,
}


def test_import_loads_lowtide_alone_and_counts_flops(plain_environment):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=plain_environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["[]", str(FLOPS)]
