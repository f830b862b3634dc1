"""Every kernel of distillation compiles ahead of time, without a GPU, and fits into registers."""

import importlib.util
import re
from pathlib import Path

import pytest

import lowtide
from tests.ops.distillation.compile_kernels import BUILDS, LEFT_OUT
from tests.support.ahead_of_time import cases, compile_all

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def compiled(request):
    return compile_all("tests.ops.distillation.compile_kernels", request)


@pytest.mark.parametrize(("name", "capability"), cases(BUILDS, LEFT_OUT))
def test_kernels_compile_without_spills(compiled, name, capability):
    result = compiled[name, capability]
    assert "error" not in result, result["error"]
    assert max(result["spill_stores"], result["spill_loads"]) == 0
    assert result["registers"] * BUILDS[name].warps * 32 <= 65536


def test_kernels_all_built():
    path = Path(lowtide.__file__).parent / "ops" / "distillation" / "softmax_triton.py"
    assert set(re.findall(r"def (\w+_kernel)\(", path.read_text())) == {
        build.kernel for build in BUILDS.values()
    }
