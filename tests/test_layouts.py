"""Tensors that are no numbers at strides (sparse, mkldnn, nested, quantized), and dtypes that no
function takes: an error that names the argument and what to do, in place of an internal one.

Shapes: N tokens, D features, V classes, P positions; B sequences.
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide import losses

N, D, V, P = 6, 8, 11, 2
pytestmark = [  # warnings that torch gives when it makes such tensors
    pytest.mark.filterwarnings("ignore:.*nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
    pytest.mark.filterwarnings("ignore:The given buffer"),
]

LAYOUTS = {
    "coo": (lambda tensor: tensor.to_sparse(), "to_dense"),
    "csr": (lambda tensor: tensor.to_sparse_csr(), "to_dense"),
    "csc": (lambda tensor: tensor.to_sparse_csc(), "to_dense"),
    "mkldnn": (lambda tensor: tensor.to_mkldnn(), "to_dense"),
    "nested": (lambda tensor: torch.nested.nested_tensor([tensor[:2], tensor[2:]]), "to_padded_tensor"),
    "jagged": (
        lambda tensor: torch.nested.nested_tensor([tensor[:2], tensor[2:]], layout=torch.jagged),
        "to_padded_tensor",
    ),
    "quantized": (lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8), "dequantize"),
}
REFUSED_DTYPES = [torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn]

x, w, b, t = torch.randn(N, D), torch.randn(V, D), torch.randn(V), torch.randint(V, (N,))
w_P, t_P = torch.randn(V, P, D), torch.randint(V, (N, P))
teacher = {"teacher_input": torch.randn(N, 3), "teacher_weight": torch.randn(V, 3)}
head, cross_entropy = torch.nn.Linear(D, V), functools.partial(F.cross_entropy, reduction="sum")
mask, advantages = torch.ones(N, V), torch.randn(N)


def distilled(divergence, **arguments):
    return getattr(lowtide.distillation, divergence)(**arguments)


def chunked(hidden, labels, factor_V):
    def loss_fn(logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum")

    return lowtide.chunked_loss(loss_fn, functools.partial(F.linear, weight=factor_V), hidden, labels)


CALLS = {
    "linear_cross_entropy": (
        lowtide.linear_cross_entropy,
        {"input": x, "linear_weight": w, "target": t, "linear_bias": b, "weight": b.abs()},
    ),
    "probabilities": (lowtide.linear_cross_entropy, {"input": x, "linear_weight": w, "target": mask}),
    "positions": (lowtide.linear_cross_entropy, {"input": x, "linear_weight": w_P, "target": t_P}),
    "linear_log_probs": (
        lowtide.linear_log_probs,
        {"input": x, "linear_weight": w, "target": t, "linear_bias": b},
    ),
    "LinearCrossEntropyLoss": (lowtide.LinearCrossEntropyLoss(D, V), {"input": x, "target": t}),
    "a module's class weights": (functools.partial(lowtide.LinearCrossEntropyLoss, D, V), {"weight": b}),
    **{
        name: (
            functools.partial(distilled, name),
            {"student_input": x, "student_weight": w, "student_bias": b, "teacher_bias": b, **teacher},
        )
        for name in ("forward_kl", "reverse_kl", "jensen_shannon")
    },
    "info_nce": (functools.partial(losses.info_nce, logit_scale=1.0), {"query": x, "key": w}),
    "contrastive": (functools.partial(losses.contrastive, logit_scale=1.0), {"image": x, "text": x}),
    "z_loss": (losses.z_loss, {"input": x, "linear_weight": w, "target": t}),
    "sequence_log_probs": (
        losses.sequence_log_probs,
        {"input": x[None], "linear_weight": w, "target": t[None]},
    ),
    "dpo": (
        losses.dpo,
        {f"{whose}_{which}": b for whose in ("policy", "reference") for which in ("chosen", "rejected")},
    ),
    "grpo": (
        losses.grpo,
        {"policy": mask, "old": mask, "advantages": advantages, "mask": mask, "reference": mask},
    ),
}
ARGUMENTS = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments]


def made(make, tensor):
    try:
        return make(tensor)
    except (RuntimeError, IndexError):
        return None  # torch has no such tensor


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("call", "argument"), ARGUMENTS)
def test_tensors_not_dense(call, argument, layout):
    function, arguments = CALLS[call]
    make, hint = LAYOUTS[layout]
    given = made(make, arguments[argument])
    if given is None:
        return
    with pytest.raises((ValueError, TypeError), match=rf"{argument}.* must .*{hint}"):
        function(**{**arguments, argument: given})


@pytest.mark.parametrize("dtype", REFUSED_DTYPES)
@pytest.mark.parametrize(("call", "argument"), ARGUMENTS)
def test_dtypes(call, argument, dtype):
    function, arguments = CALLS[call]
    integers = argument in ("target", "mask", "advantages")
    if integers and not (dtype.is_complex or (dtype.is_floating_point and argument != "mask")):
        return  # classes, a mask and rewards may be integers, one by one
    if (call, argument) == ("a module's class weights", "weight"):
        return  # beside probabilities they may be integers: that is seen when it is called
    # The message may be about another argument, which is to have this one's dtype.
    with pytest.raises((ValueError, TypeError), match=r"\w must "):
        function(**{**arguments, argument: arguments[argument].to(dtype)})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("argument", ["hidden", "labels", "parameter"])
def test_chunked_loss(layout, argument):
    make, hint = LAYOUTS[layout]
    arguments = {"hidden": x, "labels": t, "parameter": w}
    given = made(make, arguments[argument])
    if given is None:
        return
    names = {"hidden": r"hidden\[0\]", "labels": r"token_tensors\[0\]", "parameter": "head.weight"}
    if argument == "parameter":
        if layout == "quantized":
            return  # it cannot require a gradient
        given = given.detach().requires_grad_()
    with pytest.raises(TypeError, match=rf"{names[argument]} must be a dense tensor.*{hint}"):
        chunked(*{**arguments, argument: given}.values())


@pytest.mark.parametrize("layout", ["nested", "jagged"])
def test_nested_tensors(layout):
    nested = LAYOUTS[layout][0](torch.cat([x[:4], x[:4]])[2:])
    call = lambda input: lowtide.linear_cross_entropy(input, w, t[:2])  # noqa: E731
    with pytest.raises(TypeError, match=r"input must be a dense tensor, got a nested one"):
        torch.vmap(call)(nested)
