"""Every kernel compiles ahead of time, without a GPU, and keeps its numbers in registers."""

import importlib.util
import re
from pathlib import Path

import pytest

import lowtide
from tests.ops.linear_cross_entropy.engines.compile_kernels import BUILDS, LEFT_OUT, SLOW
from tests.support.ahead_of_time import cases, compile_all

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def compiled(request):
    return compile_all("tests.ops.linear_cross_entropy.engines.compile_kernels", request)


@pytest.mark.parametrize(("name", "capability"), cases(BUILDS, LEFT_OUT, SLOW))
def test_kernels_compile_without_spills(compiled, name, capability):
    result = compiled[name, capability]
    print(result)
    assert "error" not in result, result["error"]
    assert max(result["spill_stores"], result["spill_loads"]) <= BUILDS[name].spills
    assert result["registers"] * BUILDS[name].warps * 32 <= 65536
    assert result["shared"] <= (163 if capability == 80 else 227) << 10


def test_kernels_all_built():
    """All entry kernels: those whose names end in _kernel; helpers are compiled into them."""
    package = Path(lowtide.__file__).parent
    files = [*(package / "core").rglob("*.py"), *(package / "ops" / "linear_cross_entropy").rglob("*.py")]
    kernels = {name for path in files for name in re.findall(r"def (\w+_kernel)\(", path.read_text())}
    assert kernels == {build.kernel for build in BUILDS.values()}
