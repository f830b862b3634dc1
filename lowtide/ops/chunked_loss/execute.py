"""Run a call, from checked arguments to the loss."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.ops.chunked_loss import validation
from lowtide.ops.chunked_loss.autograd import GradientInForward, Recompute
from lowtide.ops.chunked_loss.chunks import Replay, most_rows, ours, spans
from lowtide.ops.chunked_loss.functional import ROW, Call, alone, check_units
from lowtide.ops.chunked_loss.higher_order import loss_within_transforms, transformed
from lowtide.ops.chunked_loss.loop import Job, Tensors, loss_alone, peak

CHUNK_SIZE = 1024


def run(
    loss_fn: Callable[..., Any],
    head: Callable[..., Any],
    parts: Tensors,
    arguments: Sequence[Any],
    *rest: Any,
) -> Any:
    """Return the loss of a call, and its aux if asked for, alone on its modules among threads."""
    with alone((loss_fn, head, *arguments)):
        return _run_alone(loss_fn, head, parts, arguments, *rest)


def _run_alone(
    loss_fn: Callable[..., Any],
    head: Callable[..., Any],
    parts: Tensors,
    arguments: Sequence[Any],
    leading: torch.Size,
    options: dict[str, Any],
) -> Any:
    """Return the loss of a call: build its job, check it, and choose the way to differentiate."""
    rows = (*parts, *(each for each in arguments if validation.is_cut(each)))
    if not torch.is_inference_mode_enabled():  # autograd saves no inference tensors
        rows = tuple(each.clone() if each.is_inference() else each for each in rows)
    placed = tuple(ROW if validation.is_cut(each) else each for each in arguments)
    within_transforms = transformed()
    call = Call(loss_fn, head, placed, every=within_transforms)
    validation.check_modules(call.modules)
    check_units(call.modules, head)
    validation.check_learned(call.names, call.learned, parts[0])
    tensors: Tensors = (*rows, *call.learned)
    wanted = tuple(torch.is_grad_enabled() and each.requires_grad for each in tensors)
    job = Job(
        call=call,
        hidden=len(parts),
        cut=len(rows),
        leading=leading,
        chunks=spans(math.prod(leading), options["chunk_size"] or CHUNK_SIZE),
        wanted=wanted,
        per_row=options["mode"] == "recompute",
        has_aux=options["has_aux"],
        replay=Replay(tensors),
    )
    job.state, job.constants = job.state_of(tensors), call.constants()
    if within_transforms:
        validation.check_no_workspace(options["workspace"])
        loss = loss_within_transforms(job, tensors)
    else:
        validation.check_wanted(wanted)
        if options["workspace"] is not None:
            job.chunks = spans(job.rows, _rows_within(options["workspace"], job, tensors, (head, loss_fn)))
            validation.check_unchanged(job.changed(tensors))
        if not any(wanted):
            loss = loss_alone(job, tensors, graph=False)
        else:
            loss = (Recompute if job.per_row else GradientInForward).apply(job, *tensors)
    if not job.has_aux:
        return loss
    return loss, {name: total.total for name, total in job.aux.items()}


_known: Any = (
    weakref.WeakKeyDictionary()
)  # head -> loss_fn (of methods, the owners) -> kinds of tensors -> rows


def _rows_within(workspace: int, job: Job, tensors: Tensors, functions: tuple[Any, Any]) -> int:
    """Return how many rows fit the workspace.

    It is measured once for these functions and kinds of tensors, then kept.
    """
    if job.rows < 2:
        return 1
    # A bound method is a new object on each access, so its owner is the key.
    head, loss_fn = (getattr(function, "__self__", function) for function in functions)
    methods = tuple(getattr(function, "__func__", None) for function in functions)
    try:
        sizes = _known.setdefault(head, weakref.WeakKeyDictionary()).setdefault(loss_fn, {})
    except TypeError:  # a function without weak references is measured every time
        sizes = {}
    dims = len(job.leading)
    shapes = tuple(tensor.shape[dims:] if k < job.cut else tensor.shape for k, tensor in enumerate(tensors))
    kinds = tuple((tensor.dtype, str(tensor.device)) for tensor in tensors)
    key = (methods, workspace, shapes, kinds, job.wanted, tuple(job.replay.casts))
    rows, all_of_them = sizes.get(key, (0, True))
    if all_of_them and rows < job.rows:
        # The caller's hooks of saved tensors must not see these runs, since the next call makes
        # none.
        with ours():
            rows = most_rows(workspace, job.rows, lambda rows: peak(job, tensors, rows))
        sizes[key] = rows, rows == job.rows
    return int(rows)
