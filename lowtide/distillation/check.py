"""What a call must look like: the argument, what was expected, what came, and what to do."""

import torch
from torch import Tensor

from lowtide.distillation.heads import Heads
from lowtide.linear_cross_entropy.check import ArgumentError, ArgumentTypeError

REDUCTIONS = ("mean", "sum", "none")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_heads(heads: Heads) -> None:
    named = {name: tensor for name, tensor in heads._asdict().items() if tensor is not None}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    for name in ("student_input", "teacher_input"):
        if named[name].dim() < 1:
            raise ArgumentError(f"{name} must have shape [..., D], got a 0-d tensor")
    _check_shapes(named)
    _check_dtypes(named)
    device = heads.device
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"student_input must be on the CPU or a CUDA device, got {device}; move it")
    for name, tensor in named.items():
        if tensor.device != device:
            raise ArgumentError(
                f"{name} must be on student_input's device ({device}), got {tensor.device}; move it"
            )


def check_options(
    student_softcap: object,
    teacher_softcap: object,
    temperature: object,
    reduction: object,
    workspace: object,
) -> None:
    if reduction not in REDUCTIONS:
        hint = "; for that of torch's kl_div, take 'sum' and divide" if reduction == "batchmean" else ""
        raise ArgumentError(
            f"reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}{hint}"
        )
    for name, softcap in (("student_softcap", student_softcap), ("teacher_softcap", teacher_softcap)):
        if softcap is None:
            continue
        if not _is_number(softcap):
            raise ArgumentTypeError(f"{name} must be a float or None, got {softcap!r}")
        if not 0 < softcap < float("inf"):  # type: ignore[operator]
            raise ArgumentError(f"{name} must be a finite number above 0, or None for none, got {softcap}")
    if not _is_number(temperature):
        raise ArgumentTypeError(f"temperature must be a float, got {temperature!r}")
    if not 0 < temperature < float("inf"):  # type: ignore[operator]
        raise ArgumentError(f"temperature must be a finite number above 0, got {temperature}")
    if workspace is not None and (not isinstance(workspace, int) or isinstance(workspace, bool)):
        raise ArgumentTypeError(f"workspace must be a number of bytes (int) or None, got {workspace!r}")


def check_beta(beta: object) -> None:
    if not _is_number(beta):
        raise ArgumentTypeError(f"beta must be a float, got {beta!r}")
    if not 0 < beta < 1:  # type: ignore[operator]
        raise ArgumentError(
            f"beta must be between 0 and 1, and neither of them, got {beta}; "
            "the divergence vanishes there: call forward_kl (for 0) or reverse_kl (for 1)"
        )


def _check_shapes(named: dict[str, Tensor]) -> None:
    leading = named["student_input"].shape[:-1]
    for side in ("student", "teacher"):
        input, weight = named[f"{side}_input"], named[f"{side}_weight"]
        D = input.shape[-1]
        if weight.dim() != 2 or weight.shape[1] != D:
            raise ArgumentError(
                f"{side}_weight must have shape [V, {D}] to match {side}_input {list(input.shape)}, "
                f"got {list(weight.shape)}; pass the weight of a torch.nn.Linear as it is, without .T"
            )
    V = named["student_weight"].shape[0]
    if V == 0:
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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
