"""`lowtide.warmup` runs the loss once as training will: same sizes, dtypes and options."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

import lowtide
from lowtide import first_call
from lowtide.core.bfloat16_units import gemm
from lowtide.tools.doctor.linear_cross_entropy import AskedLossCall
from tests.support.commands import invoke, said


@pytest.fixture
def calls(monkeypatch):
    """The calls of the loss, which are run as well."""
    made = []
    real = first_call.linear_cross_entropy

    def spy(*inputs, **options):
        made.append((inputs, options))
        return real(*inputs, **options)

    monkeypatch.setattr(first_call, "linear_cross_entropy", spy)
    return made


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_calls_have_shapes_dtype_options_and_gradients(calls, dtype, context):
    before = torch.get_rng_state()
    with context():
        options = {"softcap": 30.0, "linear_bias": True, "row_weight": True, "weight": True}
        lowtide.warmup([(4096, 8, 40), (5, 16, 24)], dtype=dtype, device="cpu", workspace=1 << 16, **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(calls) == 2
    for (N, D, V), ((input_ND, weight_VD, target_N), given) in zip([(16, 8, 40), (5, 16, 24)], calls):
        assert (input_ND.shape, weight_VD.shape, target_N.shape) == ((N, D), (V, D), (N,))
        assert input_ND.dtype == weight_VD.dtype == given["linear_bias"].dtype == dtype
        assert (given["linear_bias"].shape, given["weight"].shape) == ((V,), (V,))
        assert given["row_weight"].shape == (N,)
        assert (given["softcap"], given["workspace"]) == (30.0, 1 << 16)
        # Each got one, so backward ran too.
        assert input_ND.grad is not None
        assert weight_VD.grad is not None


def test_under_autocast_products_are_in_its_dtype(calls):
    with torch.autocast("cpu", torch.bfloat16):
        lowtide.warmup([(4, 8, 40)], dtype=torch.float32, device="cpu", reduction="none")
    ((input_ND, weight_VD, _), options) = calls[0]
    assert input_ND.dtype == weight_VD.dtype == torch.float32
    assert options == {"reduction": "none"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"reduction": "none"}])
def test_few_tokens_take_the_same_engine_on_the_cpu(dtype, options):
    few, many = (
        AskedLossCall(N, 2048, 1024, dtype=dtype, device="cpu", **options).describe()["engine"]
        for N in (first_call.CPU_TOKENS, 8192)
    )
    assert few == many


PROGRAM = """
import torch
import lowtide
from lowtide.core.bfloat16_units import compiled_library

built, build = [], compiled_library._build
compiled_library._build = lambda *given: (built.append(1), build(*given))[1]
lowtide.warmup([(8192, 2048, 1024)], device="cpu")
after_warmup = len(built)
x, w = (torch.randn(rows, 2048, dtype=torch.bfloat16, requires_grad=True) for rows in (40, 1024))
lowtide.linear_cross_entropy(x, w, torch.zeros(40, dtype=torch.long)).backward()
print(after_warmup, len(built))
"""


@pytest.mark.extended
@pytest.mark.skipif(not gemm.available(), reason="no bfloat16 products of ours here")
def test_products_of_the_cpu_are_compiled_before_the_call(tmp_path, plain_environment):
    fresh = plain_environment | {"TORCHINDUCTOR_CACHE_DIR": os.fspath(tmp_path)}
    printed = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-c", PROGRAM], env=fresh, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        printed.append(run.stdout.split())
    assert printed == [["1", "1"], ["0", "0"]], "built by the first process, found by the second"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0}, {"reduction": "none"}, {"workspace": 64 << 20}])
@pytest.mark.parametrize("shape", [(5000, 768, 50257), (4096, 1024, 32000)])
def test_no_kernel_is_compiled_after_it(shape, options, monkeypatch):
    from triton import knobs

    N, D, V = shape
    lowtide.warmup([shape], **options)
    compiled = []
    hook = lambda *_, **given: compiled.append(given["fn"].name)  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    input_ND, weight_VD = (
        torch.randn(rows, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for rows in (N, V)
    )
    target_N = torch.randint(V, (N,), device="cuda")
    lowtide.linear_cross_entropy(input_ND, weight_VD, target_N, **options).sum().backward()
    assert compiled == []


@pytest.mark.parametrize(
    ("shapes", "error", "words"),
    [
        ((16, 8, 40), TypeError, r"shapes must be a list of \(N, D, V\), got 16 in it"),
        (16, TypeError, r"shapes must be a list of \(N, D, V\), got 16$"),
        ([(16, 8)], TypeError, r"got \(16, 8\) in it"),
        ([(16, 0, 40)], ValueError, r"three sizes above 0, \(N, D, V\), got \(16, 0, 40\)"),
        ([(16, 8, 4.5)], ValueError, "three sizes above 0"),
    ],
)
def test_shapes_refused(shapes, error, words):
    with pytest.raises(error, match=words):
        lowtide.warmup(shapes)


def test_options_are_those_of_the_call():
    with pytest.raises(ValueError, match="softcap must be"):
        lowtide.warmup([(4, 8, 40)], softcap=-1.0, device="cpu")
    with pytest.raises(TypeError, match="temperature"):
        lowtide.warmup([(4, 8, 40)], temperature=2.0, device="cpu")


def test_command(calls):
    arguments = ("--device", "cpu", "--autocast", "bfloat16", "--dtype", "float32", "--bias")
    shapes = ("--shape", "24,8,40", "--shape", "4,8,16")
    done = invoke("warmup", *shapes, *arguments, "--softcap", "30", "--workspace", "1MiB")
    assert done.exit_code == 0, done.output
    first, second = done.output.splitlines()
    assert first.startswith("24 x 8 x 40 float32 on cpu: ")
    assert first.endswith(" s")
    assert second.startswith("4 x 8 x 16 ")
    for _, given in calls:
        assert (given["softcap"], given["workspace"], given["reduction"]) == (30.0, 2**20, "mean")
        assert given["linear_bias"].requires_grad


@pytest.mark.parametrize("words", ["24,8", "a,b,c"])
def test_command_refuses_other_words(words):
    done = invoke("warmup", "--shape", words)
    assert done.exit_code == 2
    assert f"'{words}' must be N,D,V" in said(done)
