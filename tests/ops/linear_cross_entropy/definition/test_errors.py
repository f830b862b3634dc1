"""Each bad argument: the exact exception, its message with argument, expectation, what came."""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from tests.support.loss import fused, make_inputs, smallest_workspace
from tests.support.ranks import needs_gloo

x, w, t = torch.randn(4, 3), torch.randn(7, 3), torch.tensor([0, 1, -100, 6])
V, p = torch.ones(7), torch.rand(4, 7)
w_K, t_K = torch.randn(7, 2, 3), torch.zeros(4, 2).long()


def call(input=x, linear_weight=w, target=t, **options):
    return lowtide.linear_cross_entropy(input, linear_weight, target, **options)


BAD = [
    # the mistake, the arguments, the exception, and words of its message
    ("input is a list", {"input": [1.0]}, TypeError, "input must be a torch.Tensor, got list"),
    ("weight is None", {"linear_weight": None}, TypeError,
     "linear_weight must be a torch.Tensor, got NoneType"),
    ("weight is a layer", {"linear_weight": torch.nn.Linear(3, 7)}, TypeError,
     "linear_weight must be a torch.Tensor, got Linear; pass its .weight"),
    ("weight is a norm and a layer", {"linear_weight": nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 7))},
     TypeError, "got Sequential; apply what comes before its Linear '1', and pass that one's .weight, ",
     "and its .bias as linear_bias"),
    ("weight is a head in a head",
     {"linear_weight": nn.Sequential(nn.Sequential(nn.Linear(3, 7, bias=False)))}, TypeError,
     "got Sequential; apply what comes before its Linear '0.0', and pass that one's .weight"),
    ("weight is a layer and what follows", {"linear_weight": nn.Sequential(nn.Linear(3, 7), nn.Tanh())},
     TypeError, "got Sequential; lowtide.chunked_loss takes any module as head"),
    ("weight is a norm", {"linear_weight": nn.LayerNorm(3)}, TypeError,
     "got LayerNorm; lowtide.chunked_loss takes any module as head"),
    ("target is an int", {"target": 3}, TypeError, "target must be a torch.Tensor, got int"),
    ("bias is a bool", {"linear_bias": True}, TypeError, "linear_bias must be a torch.Tensor, got bool"),
    ("class weights in a list", {"weight": [1.0]}, TypeError, "weight must be a torch.Tensor, got list"),
    ("0-d input", {"input": torch.tensor(1.0)}, ValueError, "input must have shape [..., D], got a 0-d"),
    ("weight transposed", {"linear_weight": w.t()}, ValueError,
     "linear_weight must have shape [V, 3] to match input [4, 3], got [3, 7]", "as it is, without .T"),
    ("logits as input", {"input": torch.rand(2, 2, 7)}, ValueError,
     "linear_weight must have shape [V, 7] to match input [2, 2, 7], got [7, 3]; "
     "input is what goes into the head, not its logits"),
    ("features of another head", {"linear_weight": torch.rand(7, 5)}, ValueError,
     "got [7, 5]; pass the weight of the head that input goes into"),
    ("weight 1-d", {"linear_weight": w[0]}, ValueError,
     "linear_weight must have shape [V, 3] to match input"),
    ("no classes", {"linear_weight": w[:0]}, IndexError,
     "target must hold no class, as linear_weight has none, or ignore_index (-100), got 0"),
    ("no classes to square", {"linear_weight": w[:0], "target": p[:, :0], "z_loss": 0.1}, ValueError,
     "linear_weight must have at least one class where z_loss is not 0"),
    ("target too short", {"target": t[:3]}, ValueError,
     "target must have shape [4], that of input", "got [3]; slice input and target alike"),
    ("target too long", {"target": t[:, None]}, ValueError, "target must have shape [4]",
     "got [4, 1]; pass target.reshape(4)"),
    ("target flat", {"input": x.view(2, 2, 3)}, ValueError, "target must have shape [2, 2]",
     "got [4]; pass target.reshape(2, 2)"),
    ("target not flat", {"target": t.view(2, 2)}, ValueError, "got [2, 2]; pass target.reshape(4)"),
    ("target of one row", {"input": x[0], "target": t[:1, None]}, ValueError,
     "got [1, 1]; pass target.reshape(())"),
    ("target with batch first", {"input": torch.rand(3, 2, 3), "target": torch.zeros(2, 3).long()},
     ValueError, "got [2, 3]; pass target.T"),
    ("target in other batches", {"input": torch.rand(2, 6, 3), "target": torch.zeros(3, 4).long()},
     ValueError, "got [3, 4]; slice input and target alike"),
    ("arguments in Liger's order", {"input": w, "linear_weight": x}, ValueError,
     "target must have shape [7]", "got [4]; input comes first: pass (input, linear_weight, target)"),
    ("Liger's order and probabilities", {"input": w, "linear_weight": x, "target": p}, ValueError,
     "target must have shape [7, 4]", "got [4, 7]; input comes first: pass"),
    ("Liger's order and sequences", {"input": w, "linear_weight": x.view(2, 2, 3), "target": t.view(2, 2)},
     ValueError, "target must have shape [7, 2]", "got [2, 2]; input comes first: pass"),
    ("Liger's order and a flat target", {"input": w, "linear_weight": x.view(2, 2, 3)}, ValueError,
     "target must have shape [7, 2]", "got [4]; input comes first: pass"),
    ("Liger's order, as many classes as rows", {"input": w[:4], "linear_weight": x.view(2, 2, 3),
     "target": t.view(2, 2)}, ValueError, "got [2, 2]; input comes first: pass"),
    ("probabilities flat", {"input": x.view(2, 2, 3), "target": p}, ValueError,
     "target must have shape [2, 2]", "got [4, 7]; pass target.reshape(2, 2, 7)"),
    ("too few probabilities", {"target": p[:3]}, ValueError,
     "target must have shape [4, 7] where it holds class probabilities, got [3, 7]"),
    ("probabilities of other classes", {"target": p[:, 1:]}, ValueError,
     "target must have shape [4, 7] where it holds class probabilities, got [4, 6]"),
    ("bias too short", {"linear_bias": V[:6]}, ValueError, "linear_bias must have shape [7]", "got [6]"),
    ("bias 2-d", {"linear_bias": V[:, None]}, ValueError, "linear_bias must have shape [7]", "got [7, 1]"),
    ("class weights too long", {"weight": torch.ones(8)}, ValueError,
     "weight must have shape [7]", "got [8]"),
    ("float target", {"target": t.float()}, TypeError,
     "target must hold class indices", "torch.int64", "or class probabilities",
     "got torch.float32 of shape [4]; use target.long()"),
    ("integer probabilities", {"target": p.long()}, ValueError, "target must have shape [4]",
     "got [4, 7]; class probabilities must be of a floating-point dtype"),
    ("complex probabilities", {"target": p + 0j}, (ValueError, TypeError), "target must"),
    ("probabilities and ignore_index", {"target": p, "ignore_index": -100}, ValueError,
     "ignore_index must be None where target holds class probabilities, got -100", "out of input and target"),
    ("int16 target", {"target": t.short()}, TypeError, "target must hold class indices", "got torch.int16"),
    ("bool target", {"target": t > 0}, TypeError, "target must hold class indices", "got torch.bool"),
    ("integer input", {"input": x.long()}, TypeError,
     "input must be a floating-point tensor", "torch.float64", "got torch.int64"),
    ("complex input", {"input": x + 0j}, TypeError,
     "input must be a floating-point tensor", "torch.float64", "got torch.complex64"),
    ("integer class weights", {"weight": V.long()}, TypeError,
     "weight must be a floating-point", "torch.int64"),
    ("complex class weights", {"weight": V + 0j, "target": p}, TypeError,
     "weight must be a floating-point", "torch.complex64"),
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
    ("smoothing above 1", {"label_smoothing": 1.5}, ValueError, "label_smoothing must be in [0, 1], got 1.5"),
    ("smoothing infinite", {"label_smoothing": float("inf")}, ValueError,
     "label_smoothing must be in [0, 1], got inf"),
    ("smoothing a string", {"label_smoothing": "0.1"}, TypeError,
     "label_smoothing must be a float, got '0.1'"),
    ("smoothing a vector", {"label_smoothing": V[:1]}, TypeError,
     "label_smoothing must be a float, got tensor"),
    ("smoothing that would be learned", {"label_smoothing": torch.tensor(0.1, requires_grad=True)}, TypeError,
     "label_smoothing must be a float, got tensor"),
    ("ignore_index beyond 64 bits", {"ignore_index": 2**63}, ValueError, "ignore_index must", str(2**63)),
    ("ignore_index a bool", {"ignore_index": True}, TypeError,
     "ignore_index must be an int or None, got True"),
    ("ignore_index a bool tensor", {"ignore_index": torch.tensor(True)}, TypeError,
     "ignore_index must be an int or None, got tensor(True)"),
    ("ignore_index a NumPy bool", {"ignore_index": np.True_}, TypeError,
     "ignore_index must be an int or None, got "),
    ("ignore_index a float", {"ignore_index": -100.0}, TypeError,
     "ignore_index must be an int or None, got -100.0"),
    ("softcap zero", {"softcap": 0.0}, ValueError,
     "softcap must be a finite number above 0, or None for none, got 0.0"),
    ("softcap negative", {"softcap": -30}, ValueError, "softcap must be a finite number above 0", "got -30"),
    ("softcap infinite", {"softcap": float("inf")}, ValueError, "softcap must be a finite number", "got inf"),
    ("softcap NaN", {"softcap": float("nan")}, ValueError, "softcap must be a finite number", "got nan"),
    ("softcap a NumPy bool", {"softcap": np.True_}, TypeError, "softcap must be a float, got "),
    ("softcap a string", {"softcap": "30"}, TypeError, "softcap must be a float, got '30'"),
    ("softcap a bool", {"softcap": True}, TypeError, "softcap must be a float, got True"),
    ("softcap a tensor", {"softcap": V[0]}, TypeError, "softcap must be a float, got tensor"),
    ("scale a string", {"logit_scale": "1"}, TypeError, "logit_scale must be a float, got '1'"),
    ("scale a bool", {"logit_scale": True}, TypeError, "logit_scale must be a float, got True"),
    ("scale 1-d", {"logit_scale": V[:1]}, ValueError,
     "logit_scale must be a float or a 0-d floating-point tensor, got torch.float32 of shape [1]"),
    ("scale of an integer", {"logit_scale": torch.tensor(2)}, ValueError,
     "logit_scale must be a float or a 0-d floating-point tensor, got torch.int64 of shape []"),
    ("scale on meta", {"logit_scale": V[0].to("meta")}, ValueError,
     "logit_scale must be on input's device (cpu), got meta"),
    ("z-loss negative", {"z_loss": -1e-4}, ValueError,
     "z_loss must be a finite number of at least 0, got -0.0001"),
    ("z-loss infinite", {"z_loss": float("inf")}, ValueError, "z_loss must be a finite number", "got inf"),
    ("z-loss NaN", {"z_loss": float("nan")}, ValueError, "z_loss must be a finite number", "got nan"),
    ("z-loss None", {"z_loss": None}, TypeError, "z_loss must be a float, got None"),
    ("K: input 3-d", {"input": x[None], "linear_weight": w_K, "target": t_K[None]}, ValueError,
     "input must have shape [N, D] where linear_weight has more than two dimensions", "got [1, 4, 3]"),
    ("K: input 1-d", {"input": x[0], "linear_weight": w_K, "target": t_K[0]}, ValueError,
     "input must have shape [N, D]", "got [3]"),
    ("K: target flat", {"linear_weight": w_K}, ValueError, "target must have shape [4, 2], got [4]",
     "goes with each row of input and each position of linear_weight"),
    ("K: target of all positions", {"linear_weight": w_K, "target": t_K.view(-1)}, ValueError,
     "target must have shape [4, 2], got [8]; pass target.reshape(4, 2)"),
    ("K: probabilities flat", {"linear_weight": w_K, "target": p}, ValueError,
     "target must have shape [4, 7, 2], got [4, 7]"),
    ("K: bias flat", {"linear_weight": w_K, "target": t_K, "linear_bias": V}, ValueError,
     "linear_bias must have shape [7, 2], got [7]"),
    ("K: no classes", {"linear_weight": w_K[:0], "target": t_K}, ValueError,
     "linear_weight must have at least one class where target holds class indices"),
    ("K: other features without positions", {"linear_weight": w_K[:, :0, :2], "target": t_K[:, :0]},
     ValueError, "linear_weight must have shape [V, 3]", "got [7, 2]"),
    ("K: float64 weight without positions", {"linear_weight": w_K[:, :0].double(), "target": t_K[:, :0]},
     TypeError, "linear_weight must have the dtype of input (torch.float32), got torch.float64"),
    ("K: target too large", {"linear_weight": w_K, "target": t_K + 7}, IndexError,
     "target must hold classes from 0 to 6"),
    ("K: input is a list", {"input": [1.0], "linear_weight": w_K}, TypeError, "input must be a torch.Tensor"),
    ("K: target is None", {"linear_weight": w_K, "target": None}, TypeError, "target must be a torch.Tensor"),
    ("workspace a float", {"workspace": 1e9}, TypeError,
     "workspace must be a number of bytes", "got 1000000000.0; pass 1000000000"),
    ("workspace a bool", {"workspace": True}, TypeError, "workspace must be a number of bytes", "got True"),
    ("workspace a string", {"workspace": "256MiB"}, TypeError,
     "workspace must be a number of bytes (int) or None, got '256MiB'; 256 MiB are 256 * 2**20"),
    ("workspace negative", {"workspace": -1}, ValueError,
     "workspace must hold one row of 7 logits", "got -1 bytes"),
    ("target too large", {"target": torch.tensor([0, 7, 0, 0])}, IndexError,
     "target must hold classes from 0 to 6 or ignore_index (-100), got 7; "
     "the head may have fewer classes than the tokenizer"),
    ("target negative", {"target": torch.tensor([0, -1, 0, 0])}, IndexError,
     "target must hold classes from 0 to 6 or ignore_index (-100), got -1; "
     "pass ignore_index=-1 if these rows are not to count"),
    ("-100 where another is ignored", {"target": t, "ignore_index": 0}, IndexError,
     "ignore_index (0), got -100"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "parts"), [pytest.param(a, e, m, id=i) for i, a, e, *m in BAD]
)
def test_bad_arguments(arguments, error, parts):
    with pytest.raises(error) as caught:
        call(**arguments)
    if not issubclass(caught.type, IndexError):
        assert issubclass(caught.type, RuntimeError), "what torch raises"
    for part in parts:
        assert part in str(caught.value)


def test_base_call_accepted():
    options = {"softcap": 3.0, "logit_scale": V[0], "z_loss": 0.1, "label_smoothing": 0.1}
    assert call(linear_bias=V, weight=V, ignore_index=-100, **options).isfinite()
    assert call(target=p, linear_bias=V, weight=V, **options).isfinite()
    assert call(linear_weight=w_K, target=t_K, weight=V, **options).isfinite()


BAD_LOG_PROBS = [
    ("float target", {"target": t.float()}, TypeError, "target must hold class indices"),
    ("probabilities", {"target": p}, TypeError, "target must hold class indices here, got torch.float32"),
    ("target too short", {"target": t[:3]}, ValueError, "target must have shape [4]"),
    ("target too large", {"target": t + 7}, IndexError, "target must hold classes from 0 to 6"),
    ("no classes", {"linear_weight": w[:0]}, ValueError,
     "linear_weight must have at least one class, got shape [0, 3]"),
    ("K-dimensional", {"linear_weight": w_K, "target": t_K}, ValueError,
     "linear_weight must have shape [V, D] here, got [7, 2, 3]"),
    ("softcap zero", {"softcap": 0}, ValueError, "softcap must be a finite number above 0"),
    ("scale 1-d", {"logit_scale": V}, ValueError, "logit_scale must be a float or a 0-d"),
    ("ignore_index a float", {"ignore_index": 1.0}, TypeError, "ignore_index must be an int or None"),
    ("ignore_index beyond 64 bits", {"ignore_index": -(2**64)}, ValueError, "ignore_index must"),
    ("workspace negative", {"workspace": -1}, ValueError, "workspace must hold one row of 7 logits"),
    ("backend", {"backend": "cuda"}, ValueError, "backend must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "part"), [pytest.param(a, e, m, id=i) for i, a, e, m in BAD_LOG_PROBS]
)
def test_bad_arguments_of_log_probs(arguments, error, part):
    with pytest.raises(error, match=re.escape(part)):
        lowtide.linear_log_probs(**{"input": x, "linear_weight": w, "target": t} | arguments)


def test_class_weight_of_module_not_tensor():
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor, got list"):
        lowtide.LinearCrossEntropyLoss(3, 4, weight=[1.0] * 4)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_target_out_of_range_no_grad(reduction):
    with torch.no_grad(), pytest.raises(IndexError, match="got 9"):
        call(target=torch.tensor([0, 9, 0, 0]), reduction=reduction)


@needs_gloo
def test_target_out_of_range_on_a_rank():
    """Its weight may be a part of the head, as `weight.to_local()` is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(IndexError, match="pass group= if the weight is a rank's part of a divided head"):
            call(target=t.clamp(min=0) + 3)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [False, True])
def test_workspace_named_in_error_suffices(device, options, dtype, reduction):
    inputs = make_inputs(device=device, dtype=dtype, bias=options, class_weight=options)
    chosen = {"reduction": reduction, "label_smoothing": 0.1 * options}
    least = smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **chosen))
    message = f"classes: {least} bytes in this call, got {least - 1} bytes"
    with pytest.raises(ValueError, match=message):
        fused(inputs, workspace=least - 1, **chosen)
    assert fused(inputs, workspace=least, **chosen).isfinite().all()


def test_devices_mismatched(device):
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
import os, torch, lowtide
import triton

os.environ.update({environment})
x, w, target = torch.randn(4, 3), torch.randn(7, 3), torch.zeros(4).long()
for run in (
    lambda: lowtide.linear_cross_entropy(x, w, target, backend="triton"),
    lambda: lowtide.memory_efficient_attention(*(torch.randn(1, 4, 2, 8),) * 3, backend="triton"),
):
    try:
        run()
    except ValueError as error:
        print(error)
"""


@pytest.mark.extended
@pytest.mark.parametrize("environment", [{}, {"TRITON_INTERPRET": "1"}], ids=["", "interpreted, too late"])
def test_triton_refuses_cpu(plain_environment, environment):
    """Too late: Triton is imported."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", REFUSED.format(environment=environment)],
        env=plain_environment,
        capture_output=True,
        text=True,
        check=True,
    )
    for operand, said in zip(("input", "query"), run.stdout.splitlines(), strict=True):
        assert "backend='triton' cannot run this call: its kernels run on CUDA tensors" in said
        assert f"{operand} is on cpu" in said
