"""Every kernel compiles ahead of time, without a GPU, and fits its card."""

import importlib.util
import re
from pathlib import Path

import pytest

import lowtide
from tests.ops.attention.triton_backend.builds import BIAS_IN_VECTORS, BUILDS, IN_VECTORS, TRANSPOSED_BIAS
from tests.ops.attention.triton_backend.compile_kernels import LEFT_OUT, SHARED, SLOW
from tests.support.ahead_of_time import cases, compile_all

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def compiled(request):
    return compile_all("tests.ops.attention.triton_backend.compile_kernels", request)


@pytest.mark.parametrize(("name", "capability"), cases(BUILDS, LEFT_OUT, SLOW))
def test_kernels_compile_and_fit(compiled, name, capability):
    result = compiled[name, capability]
    print(result)
    assert "error" not in result, result["error"]
    assert max(result["spill_stores"], result["spill_loads"]) <= BUILDS[name].spills
    assert result["registers"] * result["warps"] * 32 <= 65536
    assert result["shared"] <= SHARED[capability]
    assert result["copies"] > 0 or not name.endswith(IN_VECTORS)  # numbers one by one are not copied so
    # Key, value and bias, three tiles ahead.
    assert result["copies"] == 9 or not name.endswith(BIAS_IN_VECTORS)
    # Query, upstream gradient, bias and three numbers of each row, three tiles ahead.
    assert result["copies"] == 18 or not name.endswith(TRANSPOSED_BIAS)
    # All have one width: a narrower one beside another is what ptxas 12.8 gets wrong
    # (tile_sizes.py).
    assert set(result["row_bytes"]) <= {64 if BUILDS[name].features <= 32 else 128}


def test_kernels_all_built():
    """All entry kernels: those whose names end in _kernel; helpers are compiled into them."""
    folder = Path(lowtide.__file__).parent / "ops" / "attention"
    kernels = {
        name for path in folder.rglob("*.py") for name in re.findall(r"def (\w+_kernel)\(", path.read_text())
    }
    assert kernels == {build.kernel for build in BUILDS.values()}
