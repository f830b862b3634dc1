"""Random calls of divided heads on random meshes and shards, with ranks as threads of a process."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist

# torch's own tests have it, so a build of torch may leave it out.
THREADS = "torch.testing._internal.distributed.multi_threaded_pg"
pytestmark = pytest.mark.skipif(
    not dist.is_available() or importlib.util.find_spec(THREADS) is None, reason=f"needs {THREADS}"
)


@pytest.mark.parametrize(
    "seeds", [(0, 10), pytest.param((10, 150), marks=pytest.mark.extended)], ids=["few", "many"]
)
def test_random_meshes(seeds):
    """1 to 8 ranks, shards of any size, even empty, in any order; meshes of up to 3 dimensions."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    module = "tests.ops.linear_cross_entropy.ranks.vocab_parallel_threads"
    command = [sys.executable, "-m", module, *map(str, seeds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["count"] == 2 * (seeds[1] - seeds[0])
    assert not found["failed"]
