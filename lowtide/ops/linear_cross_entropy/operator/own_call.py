"""Collect what a rank tells the others of its call, and compare what must be equal on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.ops.linear_cross_entropy.definition.head import (
    Head,
    Labels,
    Options,
    VocabShard,
    tensors_by_row,
    with_rows,
)
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.ranks import equal_values
from lowtide.ops.linear_cross_entropy.ranks.agreement import OwnCall


def upstream_of(grad_output: Sequence[Tensor | None]) -> dict[str, bool]:
    """Return for each result of rows, by name, whether it has an upstream gradient here."""
    names = ("loss",) if len(grad_output) == 1 else ("log_prob", "entropy", "logsumexp")
    return {name: each is not None for name, each in zip(names, grad_output)}


def own_call(
    plan: Plan,
    head: Head,
    labels: Labels,
    rows_for: Callable[[int], int],
    upstream: dict[str, bool] | None = None,
    number: int | None = None,
) -> OwnCall:
    """Return what this rank tells the others of a call; of its backward if `upstream` is given."""
    name = "linear_log_probs" if plan.call_kind.log_probs else "linear_cross_entropy"
    return OwnCall(
        operator=name if upstream is None else f"{name}_backward",
        shard=plan.options.shard,
        classes=head.classes,
        tokens=head.tokens,
        device=head.device,
        equal=facts_of(plan, head, labels),
        equal_tensors=equal_tensors_of(plan, head, labels),
        rows_for=rows_for,
        upstream=upstream or {},
        number=number,
    )


def compared(plan: Plan, head: Head, labels: Labels) -> tuple[Head, Labels, Tensor | None]:
    """Compare on the device what must be equal on all ranks of a call that they have agreed on.

    Return the head and labels, with which the results are NaN if something differs, and True for
    each tensor that does; None if the device compares nothing.
    """
    tensors = equal_values.on_device(equal_tensors_of(plan, head, labels))
    if not tensors:
        return head, labels, None
    assert plan.agreement is not None
    differ_k = equal_values.compare(plan.agreement.group, tensors)
    return *_nan_where(differ_k.any(), head, labels, plan.options), differ_k


def _nan_where(differ: Tensor, head: Head, labels: Labels, options: Options) -> tuple[Head, Labels]:
    """Make the results NaN if `differ` is True: by a scale, weights or targets of no class."""

    def marked(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.masked_fill(differ, torch.nan)
        return tensor.long().masked_fill(differ, -1 if options.ignore_index != -1 else -2)

    if not options.tokens_sharded:
        target, *others = tensors_by_row(labels).values()
        # Each rank has the class probabilities of its own classes, which are not compared.
        target = target if target.is_floating_point() else marked(target)
        labels = with_rows(labels, [target, *map(marked, others)])
    if labels.normalizer is not None:
        labels = labels._replace(normalizer=marked(labels.normalizer))
    return head if head.scale is None else head._replace(scale=marked(head.scale)), labels


def facts_of(plan: Plan, head: Head, labels: Labels) -> dict[str, Any]:
    """Return what must be equal on all ranks of a call of the loss, by name, for JSON."""
    options, call_kind = plan.options, plan.call_kind
    own = ("few_tokens", "dense", "compute_dtype", "workspace", "backend", *VocabShard._fields)
    given = {"linear_bias": head.bias, "logit_scale": head.scale, **labels._asdict()}
    facts = {name: value for name, value in options._asdict().items() if name not in own}
    facts["input's features"] = [each.shape[-1] for each in head.inputs]
    facts["input's dtype"] = str(options.compute_dtype)
    facts["arguments"] = [name for name, each in given.items() if each is not None]
    facts["class probabilities"] = call_kind.probabilities
    facts["requires_grad of input, linear_weight, linear_bias, logit_scale"] = [*call_kind.needs_grad.all]
    return facts


def equal_tensors_of(plan: Plan, head: Head, labels: Labels) -> dict[str, Tensor | None]:
    """Return the tensors whose numbers must be equal on all ranks of a call, by name."""
    if plan.options.ranks == 1:
        return {}
    tensors = {"normalizer": labels.normalizer, "logit_scale": head.scale}
    if plan.options.tokens_sharded:
        return tensors
    by_row = tensors_by_row(labels)
    target = by_row.pop("target")
    if not plan.call_kind.probabilities:  # each rank has probabilities of its own classes only
        by_row["target"] = target.long()
    return tensors | by_row
