"""Check the arguments of a call and what its functions return.

Each error message names the argument, what was expected, what came, and what to do.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lowtide.core import torch_private
from lowtide.core.autodiff import graph_nodes
from lowtide.core.checks import check_choice, check_dense
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.core.fsdp import check_gathered
from lowtide.ops.linear_cross_entropy.data_sharded import check_whole

MODES = ("gradient_in_forward", "recompute")
MEANS = ("mean", "batchmean")
GATHERING = (
    "make a unit of head (fully_shard(head) before its parent's) and pass head itself, or call this in the "
    "forward of the unit that head is part of"
)
OF_FULL_TENSOR = ("_ToTorchTensorBackward", "RedistributeBackward")  # nodes of DTensor.full_tensor()
# Nodes whose result has the means of their operands.
LINEAR = ("Add", "Sub", "Neg", "ToCopy", *OF_FULL_TENSOR)
ORDER = "pass (loss_fn, head, hidden, ...) in this order"
INSTEAD_OF_TENSOR = {
    "loss_fn": f"; {ORDER}",
    "head": "; pass the nn.Linear itself, or functools.partial(F.linear, weight=...)",
}


def check_options(loss_fn: Any, head: Any, chunk_size: Any, workspace: Any, mode: Any) -> None:
    """Raise unless both functions are callable and the options are valid."""
    for name, function in (("loss_fn", loss_fn), ("head", head)):
        if not callable(function):
            hint = INSTEAD_OF_TENSOR[name] if isinstance(function, Tensor) else ""
            raise ArgumentTypeError(f"{name} must be callable, got {type(function).__name__}{hint}")
    if isinstance(loss_fn, nn.Linear):
        raise ArgumentTypeError(
            f"loss_fn must take what head returns, then the token tensors, got Linear; {ORDER}"
        )
    check_choice("mode", mode, MODES)
    if chunk_size is not None and workspace is not None:
        raise ArgumentError("chunk_size and workspace must not both be given: one follows from the other")
    for name, value, unit in (("chunk_size", chunk_size, "rows"), ("workspace", workspace, "bytes")):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ArgumentTypeError(f"{name} must be an int, {unit}, got {value!r}")
        if value is not None and value < 1:
            raise ArgumentError(f"{name} must be at least 1, got {value}")
    if _reduces_by_mean(loss_fn):
        raise ArgumentError(
            "loss_fn must return the sum over its rows, but reduces by the mean: means of chunks do not add "
            "up. Give it reduction='sum' and divide the result by the number of rows that count"
        )


def check_rows(hidden: Sequence[Any], arguments: Sequence[Any]) -> torch.Size:
    """Check hidden and the token tensors, and return the leading dimensions that they share."""
    first = hidden[0] if hidden else None
    if not all(isinstance(each, Tensor) for each in hidden) or first is None:
        kinds = ", ".join(type(each).__name__ for each in hidden) or "nothing"
        raise ArgumentTypeError(f"hidden must be a tensor or a tuple of tensors, got {kinds}")
    for k, each in enumerate(hidden):
        check_dense(f"hidden[{k}]", each)
    for k, each in enumerate(arguments):
        if isinstance(each, Tensor):
            check_dense(f"token_tensors[{k}]", each)
    if first.dim() < 2:
        hint = "a single row is hidden[None]" if first.is_floating_point() else ORDER
        came = list(first.shape) if first.is_floating_point() else f"{list(first.shape)} of {first.dtype}"
        raise ArgumentError(f"hidden must be [..., T, D], got {came}; {hint}")
    leading = first.shape[:-1]
    named = [(f"hidden[{k}]", each) for k, each in enumerate(hidden)]
    named += [(f"token_tensors[{k}]", each) for k, each in enumerate(arguments) if is_cut(each)]
    for name, tensor in named:
        if tensor.shape[: len(leading)] != leading:
            raise ArgumentError(
                f"{name} must have the rows of hidden, {list(leading)}, as its leading dimensions, got "
                f"{list(tensor.shape)}; what every chunk is to see whole goes in by "
                "functools.partial(loss_fn, ...)"
            )
        if tensor.device != first.device:
            raise ArgumentError(
                f"{name} must be on hidden's device ({first.device}), got {tensor.device}; move it"
            )
    return leading


def check_learned(names: Sequence[str], learned: Sequence[Tensor], hidden: Tensor) -> None:
    """Raise unless the learned tensors are dense, whole, real and on hidden's device."""
    for name, tensor in zip(names, learned):
        check_dense(name, tensor)
        check_gathered(name, tensor, GATHERING)
        check_whole(name, tensor)
        if tensor.is_complex():
            raise ArgumentTypeError(
                f"{name} must not be complex, got {tensor.dtype}: keep torch.view_as_real of it, and use "
                "torch.view_as_complex in head"
            )
        if tensor.device != hidden.device and tensor.dim():
            raise ArgumentError(
                f"{name} must be on hidden's device ({hidden.device}), got {tensor.device}; move one of them"
            )


def check_needs_grad(needs_grad: Sequence[bool]) -> None:
    """Raise if gradients are enabled and no tensor needs one."""
    if torch.is_grad_enabled() and not any(needs_grad):
        raise ArgumentError(
            "nothing here needs a gradient: no parameter of head or loss_fn, not hidden, no token tensor; to "
            "compute the loss alone, call under torch.no_grad()"
        )


def check_no_workspace(workspace: int | None) -> None:
    """Raise if a workspace is given where it cannot be measured."""
    if workspace is not None:
        raise ArgumentError(
            "workspace cannot be measured under torch.func's transforms or in forward mode: give chunk_size"
        )


def check_result(value: Any, rows: int, per_row: bool) -> None:
    """Raise unless loss_fn returned a sum over `rows` rows or, if `per_row`, a value for each."""
    if not isinstance(value, Tensor):
        hint = "; a pair (sum, dict) needs has_aux=True" if isinstance(value, tuple) else ""
        raise ArgumentTypeError(f"loss_fn must return a tensor, got {type(value).__name__}{hint}")
    if not value.is_floating_point():
        raise ArgumentTypeError(f"loss_fn must return a floating-point tensor, got {value.dtype}")
    if value.shape == (rows,) and not per_row:
        raise ArgumentError(
            f"loss_fn must return the sum over its rows, 0-d, got a value for each row, {list(value.shape)}; "
            "add .sum(), or pass mode='recompute' to have them all"
        )
    if value.dim() and value.shape != (rows,):
        kinds = "0-d, or a value for each row" if per_row else "0-d"
        raise ArgumentError(
            f"loss_fn must return the sum over its rows, {kinds}, got {list(value.shape)} for {rows} rows"
        )


def check_no_mean(value: Tensor, rows: int, adds_up: Callable[[], bool | None]) -> None:
    """Raise if a mean over the rows is among the terms of a 0-d value.

    The graph tells which values may contain one. Of these, `adds_up` computes whether the value of
    twice the same rows is twice the value. If it returns None, it could not tell; then raise if the
    graph shows a mean that no factor can have turned into a sum.
    """
    root = value.grad_fn if value.dim() == 0 else None
    if rows < 2 or not any(_may_average(node, rows) for node in graph_nodes(root, _may_keep_means(rows))):
        return
    found = adds_up()
    if found is None:
        found = not any(_averages(node, rows) for node in graph_nodes(root, _keeps_means))
    if not found:
        raise ArgumentError(
            "loss_fn must return the sum over its rows, got their mean: means of chunks do not add up. Sum, "
            "and divide the result by the number of rows that count"
        )


def check_sum(loss: Tensor) -> None:
    """Raise if loss_fn returned a value for each row: a normalizer divides only a sum."""
    if loss.dim():
        raise ArgumentError(
            "normalizer is what a sum over rows is divided by, but loss_fn returned a value for each row, "
            f"{list(loss.shape)}; leave normalizer out and divide the result"
        )


def check_aux(result: Any) -> None:
    """Raise unless loss_fn returned a sum and a dictionary of tensors or numbers."""
    expected = "with has_aux, loss_fn must return (sum, dict), got"
    if not isinstance(result, tuple) or len(result) != 2:
        raise ArgumentTypeError(f"{expected} {type(result).__name__}")
    aux = result[1]
    if not isinstance(aux, dict):
        raise ArgumentTypeError(f"{expected} {type(aux).__name__} as aux")
    for name, value in aux.items():
        if not isinstance(value, (Tensor, int, float)):
            raise ArgumentTypeError(f"aux[{name!r}] must be a tensor or a number, got {type(value).__name__}")


def check_modules(modules: Mapping[str, nn.Module]) -> None:
    """Raise for batch normalisation that uses the statistics of its batch."""
    for prefix, module in modules.items():
        for name, each in module.named_modules():
            if isinstance(each, _BatchNorm) and (each.training or each.running_mean is None):
                where = f"{prefix}.{name}" if name else prefix
                raise ArgumentError(
                    f"{where} must not be a {type(each).__name__} with statistics of its batch: a row's "
                    "result would depend on its chunk; put it in eval mode or before the head"
                )


def batch_statistics() -> ArgumentError:
    """Return the error for a batch normalisation that runs on the statistics of a chunk."""
    return ArgumentError(
        "head and loss_fn must not run a batch normalisation with statistics of its batch: a row's result "
        "would depend on its chunk; put its module (a teacher, say) in eval mode, or run it before the call "
        "and pass what it returns as a token tensor"
    )


def is_cut(argument: Any) -> bool:
    """Return True for an argument that is cut into chunks, not passed to each as it is."""
    return isinstance(argument, Tensor) and argument.dim() > 0


def _may_average(node: Any, rows: int) -> bool:
    """Return True if the result of a node may be a mean over the rows.

    A division by their number is one, but this number may also be one of features.
    """
    factor = _factor(node)
    return factor == 1 / rows or _averages(node, rows)


def _may_keep_means(rows: int) -> Callable[[Any], bool]:
    """Return the test for nodes in whose result a mean among the operands may be one, too."""

    def keeps(node: Any) -> bool:
        factor = _factor(node)
        return _kind(node) in LINEAR if factor is None else factor not in (0, rows)

    return keeps


def _averages(node: Any, rows: int) -> bool:
    """Return True if the result of a node is a mean over the rows."""
    kind = _kind(node)
    if kind == "Mean" and node._saved_self_sym_sizes[:1] == (rows,):
        return True
    # The divisor is a Python int only in torch's own code, such as F.cross_entropy of class
    # probabilities. In the caller's code it is a tensor.
    divides = kind == "Div" and type(node._saved_other) is int and node._saved_other == rows
    return divides or getattr(node, "_saved_reduction", None) == 1


def _keeps_means(node: Any) -> bool:
    """Return True if a mean among a node's operands is one in its result, too.

    A factor above 1 may contain the number of rows, and so turn a mean into a sum.
    """
    factor = _factor(node)
    return _kind(node) in LINEAR if factor is None else 0 < factor <= 1


def _kind(node: Any) -> str:
    return type(node).__name__.removesuffix("Backward0").removesuffix("Backward1")


def _factor(node: Any) -> float | None:
    """Return the size of the Python number that a node multiplies by; None without one."""
    kind = _kind(node)
    if kind not in ("Mul", "Div"):
        return None
    other = node._saved_other
    if isinstance(other, Tensor):
        if other.dim() or other.device.type != "cpu" or torch_private.is_wrapped(other):
            return None
        one = torch.ones((), dtype=torch.float32)
        if other.is_floating_point() and (
            other.dtype != torch.float64 or torch.result_type(one, other) != one.dtype
        ):
            return None  # an ordinary tensor; a Python number would not promote float32
        other = other.item()
    if not isinstance(other, (int, float)) or (kind == "Div" and other == 0):
        return None
    return abs(1 / other if kind == "Div" else other)


def _reduces_by_mean(loss_fn: Any) -> bool:
    """Return True if loss_fn is one of torch's own losses and reduces by the mean."""
    if isinstance(loss_fn, nn.Module):
        return type(loss_fn).__module__.startswith("torch.nn.") and getattr(loss_fn, "reduction", "") in MEANS
    function: Any = loss_fn
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        function, keywords = function.func, function.keywords | keywords
    if getattr(function, "__module__", "") != "torch.nn.functional" or not inspect.isfunction(function):
        return False
    given = inspect.signature(function).parameters.get("reduction")
    return given is not None and keywords.get("reduction", given.default) in MEANS
