"""Check the arguments of a call.

Each error message names the argument, what was expected, what came, and what to do.
"""

import torch
from torch import Tensor

from lowtide.core.checks import (
    DTYPES,
    check_choice,
    check_devices,
    check_number,
    check_softcap,
    check_tensors,
    check_workspace,
)
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.linear_cross_entropy.definition.validation import REDUCTIONS, check_term

OPTIONAL = ("student_bias", "teacher_bias", "ignored")


def check_heads(heads: Heads, *, divided: bool = False) -> None:
    """Raise unless the tensors of both heads fit; if `divided`, this rank may have no classes."""
    given = heads._asdict()
    named = {name: tensor for name, tensor in given.items() if name not in OPTIONAL or tensor is not None}
    check_tensors(named)
    for side in ("student", "teacher"):
        names = (f"{side}_input", f"{side}_weight")
        check_term(names, *(named[name] for name in names))
    _check_shapes(named, least_classes=0 if divided else 1)
    check_devices(named)
    _check_dtypes(named)


def check_options(options: DistillationOptions) -> None:
    """Raise unless the options have values in their ranges."""
    hint = "; for that of torch's kl_div, take 'sum' and divide" if options.reduction == "batchmean" else ""
    check_choice("reduction", options.reduction, REDUCTIONS, hint)
    check_softcap("student_softcap", options.student_softcap)
    check_softcap("teacher_softcap", options.teacher_softcap)
    check_number("temperature", options.temperature)
    if not 0 < options.temperature < float("inf"):
        raise ArgumentError(f"temperature must be a finite number above 0, got {options.temperature}")
    check_workspace(options.workspace)


def check_beta(beta: float) -> None:
    """Raise unless beta is strictly between 0 and 1."""
    check_number("beta", beta)
    if not 0 < beta < 1:
        raise ArgumentError(
            f"beta must be between 0 and 1, and neither of them, got {beta}; "
            "the divergence vanishes there: call forward_kl (for 0) or reverse_kl (for 1)"
        )


def _check_shapes(named: dict[str, Tensor], least_classes: int) -> None:
    """Raise unless classes and rows of both heads match."""
    leading, V = named["student_input"].shape[:-1], named["student_weight"].shape[0]
    if least_classes > V:
        raise ArgumentError("student_weight must have at least one class, got none")
    if named["teacher_weight"].shape[0] != V:
        raise ArgumentError(
            f"teacher_weight must have the student's {V} classes, got {named['teacher_weight'].shape[0]}; "
            "where one vocabulary is only padded, cut the longer weight: weight[:V]"
        )
    if named["teacher_input"].shape[:-1] != leading:
        shape = ", ".join((*map(str, leading), "D"))
        raise ArgumentError(
            f"teacher_input must have shape [{shape}], with the rows of student_input, "
            f"got {list(named['teacher_input'].shape)}"
        )
    for name in ("student_bias", "teacher_bias"):
        if name in named and named[name].shape != (V,):
            raise ArgumentError(f"{name} must have shape [{V}], got {list(named[name].shape)}")
    if "ignored" in named and named["ignored"].shape != leading:
        raise ArgumentError(
            f"ignored must have shape {list(leading)}, that of student_input without the last dimension, "
            f"got {list(named['ignored'].shape)}"
        )


def _check_dtypes(named: dict[str, Tensor]) -> None:
    """Raise unless the dtypes match, or autocast casts them."""
    if "ignored" in named and named["ignored"].dtype != torch.bool:
        raise ArgumentTypeError(
            f"ignored must be a bool tensor, True where a row does not count, got {named['ignored'].dtype}"
        )
    student = named["student_input"]
    autocast = torch.is_autocast_enabled(student.device.type)
    for side in ("student", "teacher"):
        input = named[f"{side}_input"]
        if input.dtype not in DTYPES:
            raise ArgumentTypeError(f"{side}_input must be a floating-point tensor, got {input.dtype}")
        for name in (f"{side}_weight", f"{side}_bias"):
            if name not in named or named[name].dtype == input.dtype:
                continue
            dtypes = (named[name].dtype, input.dtype)
            if not (autocast and set(dtypes) <= set(DTYPES) and torch.float64 not in dtypes):
                raise ArgumentTypeError(
                    f"{name} must have the dtype of {side}_input ({input.dtype}), got {named[name].dtype}; "
                    "cast one of them, or run under torch.autocast"
                )
    if (student.dtype == torch.float64) != (named["teacher_input"].dtype == torch.float64):
        raise ArgumentTypeError(
            "teacher_input must be float64 if student_input is, and only then, "
            f"got {named['teacher_input'].dtype} beside {student.dtype}; cast the teacher's tensors"
        )
