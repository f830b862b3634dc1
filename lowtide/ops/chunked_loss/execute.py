"""Run a call whose arguments are checked, and return its loss."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.torch_private import never_compiled
from lowtide.ops.chunked_loss import validation
from lowtide.ops.chunked_loss.autograd import WHY_EAGERLY, GradientInForward, Recompute
from lowtide.ops.chunked_loss.chunk_size import rows_within
from lowtide.ops.chunked_loss.functional.fsdp import check_units
from lowtide.ops.chunked_loss.functional.snapshot import Snapshot, check_none
from lowtide.ops.chunked_loss.functional.tensors import ROW, Functional
from lowtide.ops.chunked_loss.functional.threads import alone
from lowtide.ops.chunked_loss.higher_order import loss_in_transform
from lowtide.ops.chunked_loss.isolation import any_transform
from lowtide.ops.chunked_loss.job import Job, Tensors, spans
from lowtide.ops.chunked_loss.loop import loss_alone
from lowtide.ops.chunked_loss.replay import Replay
from lowtide.ops.linear_cross_entropy.definition.head import normalized

CHUNK_SIZE = 1024


@never_compiled(WHY_EAGERLY)
def run(
    loss_fn: Callable[..., Any],
    head: Callable[..., Any],
    hidden: Tensors,
    arguments: Sequence[Any],
    leading: torch.Size,
    options: dict[str, Any],
) -> Any:
    """Return the loss of a call, and its aux with has_aux."""
    rows = {f"hidden[{k}]": each for k, each in enumerate(hidden)}
    rows |= {f"token_tensors[{k}]": each for k, each in enumerate(arguments) if validation.is_cut(each)}
    if not torch.is_inference_mode_enabled():  # autograd cannot save inference tensors
        rows = {name: each.clone() if each.is_inference() else each for name, each in rows.items()}
    placed = tuple(ROW if validation.is_cut(each) else each for each in arguments)
    with alone((loss_fn, head, *arguments)):
        functional = Functional(loss_fn, head, placed, every=any_transform())
        validation.check_modules(functional.modules)
        check_units(functional.modules, head)
        validation.check_learned(functional.names, functional.learned, hidden[0])
        tensors: Tensors = (*rows.values(), *functional.learned)
        job = Job(
            functional=functional,
            hidden=len(hidden),
            row_names=tuple(rows),
            leading=leading,
            chunks=spans(math.prod(leading), options["chunk_size"] or CHUNK_SIZE),
            needs_grad=tuple(torch.is_grad_enabled() and each.requires_grad for each in tensors),
            per_row=options["mode"] == "recompute",
            has_aux=options["has_aux"],
            snapshot=Snapshot(functional, rows),
            replay=Replay(tensors),
        )
        loss = _loss(job, tensors, options["workspace"], (head, loss_fn))
    if options["normalizer"] is not None:
        validation.check_sum(loss)
        loss = normalized(loss, options["normalizer"])
    if not job.has_aux:
        return loss
    return loss, {name: total.total for name, total in job.aux.items()}


def _loss(job: Job, tensors: Tensors, workspace: int | None, functions: tuple[Any, Any]) -> Tensor:
    """Return the loss, computed so that it can be differentiated as this call needs."""
    if any_transform():
        validation.check_no_workspace(workspace)
        return loss_in_transform(job, tensors)
    validation.check_needs_grad(job.needs_grad)
    if workspace is not None:
        job.chunks = spans(job.rows, rows_within(workspace, job, tensors, functions))
        check_none(job.changed(tensors))
    if not any(job.needs_grad):
        return loss_alone(job, tensors, graph=False)
    loss: Tensor = (Recompute if job.per_row else GradientInForward).apply(job, *tensors)
    return loss
