"""Each bad argument: the exact exception, and a message with the argument, what was expected, what came."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import lowtide
from tests.helpers import fused, make_inputs, smallest_workspace

x, w, t = torch.randn(4, 3), torch.randn(7, 3), torch.tensor([0, 1, -100, 6])
V = torch.ones(7)


def call(input=x, linear_weight=w, target=t, **options):
    return lowtide.linear_cross_entropy(input, linear_weight, target, **options)


BAD = [
    # what is wrong, its arguments, the exception, and what its message must hold
    ("input is a list", {"input": [1.0]}, TypeError, "input must be a torch.Tensor, got list"),
    ("weight is None", {"linear_weight": None}, TypeError,
     "linear_weight must be a torch.Tensor, got NoneType"),
    ("target is an int", {"target": 3}, TypeError, "target must be a torch.Tensor, got int"),
    ("bias is a bool", {"linear_bias": True}, TypeError, "linear_bias must be a torch.Tensor, got bool"),
    ("class weights in a list", {"weight": [1.0]}, TypeError, "weight must be a torch.Tensor, got list"),
    ("0-d input", {"input": torch.tensor(1.0)}, ValueError, "input must have shape [..., D], got a 0-d"),
    ("weight transposed", {"linear_weight": w.t()}, ValueError,
     "linear_weight must have shape [V, 3] to match input [4, 3], got [3, 7]"),
    ("weight 1-d", {"linear_weight": w[0]}, ValueError,
     "linear_weight must have shape [V, 3] to match input"),
    ("no classes", {"linear_weight": w[:0]}, ValueError,
     "linear_weight must have at least one class, got shape [0, 3]"),
    ("target too short", {"target": t[:3]}, ValueError,
     "target must have shape [4], that of input", "got [3]"),
    ("probabilities", {"target": torch.rand(4, 7)}, ValueError, "target must have shape [4]", "got [4, 7]"),
    ("bias too short", {"linear_bias": V[:6]}, ValueError, "linear_bias must have shape [7]", "got [6]"),
    ("bias 2-d", {"linear_bias": V[:, None]}, ValueError, "linear_bias must have shape [7]", "got [7, 1]"),
    ("class weights too long", {"weight": torch.ones(8)}, ValueError,
     "weight must have shape [7]", "got [8]"),
    ("float target", {"target": t.float()}, TypeError,
     "target must hold class indices", "torch.int64", "got torch.float32"),
    ("int16 target", {"target": t.short()}, TypeError, "target must hold class indices", "got torch.int16"),
    ("bool target", {"target": t > 0}, TypeError, "target must hold class indices", "got torch.bool"),
    ("integer input", {"input": x.long()}, TypeError,
     "input must be a floating-point tensor", "torch.float64", "got torch.int64"),
    ("complex input", {"input": x + 0j}, TypeError,
     "input must be a floating-point tensor", "torch.float64", "got torch.complex64"),
    ("integer class weights", {"weight": V.long()}, TypeError,
     "weight must be a floating-point", "torch.int64"),
    ("weight in float64", {"linear_weight": w.double()}, TypeError,
     "linear_weight must have the dtype of input (torch.float32), got torch.float64", "torch.autocast"),
    ("bias in bfloat16", {"linear_bias": V.bfloat16()}, TypeError,
     "linear_bias must have the dtype of input (torch.float32), got torch.bfloat16"),
    ("weight on meta", {"linear_weight": w.to("meta")}, ValueError,
     "linear_weight must be on input's device (cpu), got meta"),
    ("target on meta", {"target": t.to("meta")}, ValueError,
     "target must be on input's device (cpu), got meta"),
    ("bias on meta", {"linear_bias": V.to("meta")}, ValueError,
     "linear_bias must be on input's device (cpu)"),
    ("class weights on meta", {"weight": V.to("meta")}, ValueError, "weight must be on input's device (cpu)"),
    ("class weights with gradient", {"weight": torch.ones(7, requires_grad=True)}, ValueError,
     "weight (class weights) takes no gradient", "weight.detach()"),
    ("reduction", {"reduction": "avg"}, ValueError,
     "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
    ("backend", {"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'triton'", "got 'cuda'"),
    ("smoothing below 0", {"label_smoothing": -0.1}, ValueError,
     "label_smoothing must be in [0, 1], got -0.1"),
    ("smoothing above 1", {"label_smoothing": 1.5}, ValueError, "label_smoothing must be in [0, 1], got 1.5"),
    ("smoothing NaN", {"label_smoothing": float("nan")}, ValueError,
     "label_smoothing must be in [0, 1], got nan"),
    ("smoothing a string", {"label_smoothing": "0.1"}, TypeError,
     "label_smoothing must be a float, got '0.1'"),
    ("smoothing a bool", {"label_smoothing": True}, TypeError, "label_smoothing must be a float, got True"),
    ("ignore_index a float", {"ignore_index": -100.0}, TypeError,
     "ignore_index must be an int or None, got -100.0"),
    ("workspace a float", {"workspace": 1e9}, TypeError,
     "workspace must be a number of bytes", "got 1000000000.0"),
    ("workspace a bool", {"workspace": True}, TypeError, "workspace must be a number of bytes", "got True"),
    ("workspace negative", {"workspace": -1}, ValueError,
     "workspace must hold one row of 7 logits", "got -1 bytes"),
    ("target too large", {"target": torch.tensor([0, 7, 0, 0])}, IndexError,
     "target must hold classes from 0 to 6 or ignore_index (-100), got 7"),
    ("target negative", {"target": torch.tensor([0, -1, 0, 0])}, IndexError,
     "target must hold classes from 0 to 6 or ignore_index (-100), got -1"),
    ("-100 where another is ignored", {"target": t, "ignore_index": 0}, IndexError,
     "ignore_index (0), got -100"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "parts"), [pytest.param(a, e, m, id=i) for i, a, e, *m in BAD]
)
def test_bad_arguments(arguments, error, parts):
    with pytest.raises(error) as caught:
        call(**arguments)
    assert caught.type is error
    for part in parts:
        assert part in str(caught.value)


def test_the_base_of_these_calls_is_good():
    assert call(linear_bias=V, weight=V, label_smoothing=0.1, ignore_index=-100).isfinite()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_out_of_range_targets_raise_without_gradients_too(reduction):
    with torch.no_grad(), pytest.raises(IndexError, match="got 9"):
        call(target=torch.tensor([0, 9, 0, 0]), reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [False, True])
def test_the_workspace_that_the_message_names_is_enough(device, options, dtype, reduction):
    inputs = make_inputs(device=device, dtype=dtype, bias=options, class_weight=options)
    chosen = {"reduction": reduction, "label_smoothing": 0.1 * options}
    least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **chosen))
    message = f"which takes {least} bytes in this call, got {least - 1} bytes"
    with pytest.raises(ValueError, match=message):
        fused(inputs, workspace=least - 1, **chosen)
    assert fused(inputs, workspace=least, **chosen).isfinite().all()


def test_devices_must_agree(device):
    if device == "cpu":
        pytest.skip("needs two devices")
    inputs = make_inputs(device=device)
    with pytest.raises(ValueError, match=re.escape("target must be on input's device (cuda:0), got cpu")):
        fused(replace(inputs, target=inputs.target.cpu()))


def test_triton_refuses_float64(device):
    pytest.importorskip("triton")
    inputs = make_inputs(device=device, dtype=torch.float64)
    reason = "float64" if device == "cuda" or torch.cuda.is_available() is False else "CUDA tensors"
    with pytest.raises(
        ValueError, match=f"backend='triton' cannot run this call: .*{reason}.*backend='auto'"
    ):
        fused(inputs, backend="triton")


REFUSED = """
import torch, lowtide
try:
    x, w, target = torch.randn(4, 3), torch.randn(7, 3), torch.zeros(4).long()
    lowtide.linear_cross_entropy(x, w, target, backend="triton")
except ValueError as error:
    print(error)
"""


def test_triton_refuses_the_cpu(plain_environment):
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", REFUSED], env=plain_environment, capture_output=True, text=True, check=True
    )
    assert "backend='triton' cannot run this call: its kernels run on CUDA tensors" in run.stdout
    assert "input is on cpu" in run.stdout
