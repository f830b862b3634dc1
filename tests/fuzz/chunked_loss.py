"""chunked_loss: heads and losses as people write them, in each mode and chunk, against float64."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.ops.chunked_loss import chunked_loss
from lowtide.ops.chunked_loss.execute import CHUNK_SIZE
from lowtide.ops.chunked_loss.job import spans
from tests.fuzz.calls import check, draw_upstream, with_enough_workspace
from tests.fuzz.compare import measured
from tests.fuzz.draw import Draw
from tests.fuzz.ways import WAYS, differentiated
from tests.ops.chunked_loss.helpers import HEADS, D, V, cross_entropy, dense
from tests.support.budgets import HALVES

# These transforms of torch.func would need the head's parameters as arguments.
NOT_OF_MODULES = ("vjp", "vmap")


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels)


def rows(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, "none")


def weighted(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (rows(logits, labels) * weights).sum()


def scaled(logits: Tensor, labels: Tensor, factor: Any) -> Tensor:
    return plain(logits if factor is None else logits * factor, labels)


def preferred(logits: Tensor, labels: Tensor, others: Tensor) -> Tensor:
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen, rejected = (log_p.gather(-1, each.clamp(min=0)[:, None])[:, 0] for each in (labels, others))
    return -F.logsigmoid(2 * (chosen - rejected)).sum()


def with_aux(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = plain(logits, labels)
    return loss, {"squares": logits.detach().to(loss.dtype).square().sum(), "rows": (labels >= 0).sum()}


class Pair(nn.Module):
    """A head of two hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, V)

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        return self.linear(hidden * gate)


LOSSES = {"plain": plain, "rows": rows, "weighted": weighted, "scaled": scaled, "preferred": preferred}
LOSSES["aux"] = with_aux


def case(draw: Draw) -> Callable[[], None]:
    dtype, name = draw.dtype(), draw.pick("loss", list(LOSSES))
    kind = draw.pick("head", [*HEADS, "partial", "pair"])
    torch.manual_seed(draw.randrange(1 << 30))
    head = (Pair if kind == "pair" else HEADS.get(kind, HEADS["linear"]))().to(draw.device, dtype)
    leading = draw.pick("leading", [(draw.size(40),), (2, draw.size(20)), (1, 1, draw.size(9))])
    tensors = {"hidden": draw.laid_out("hidden", draw.normal((*leading, D), dtype))}
    if kind == "pair":
        tensors["gate"] = draw.laid_out("gate", draw.normal((*leading, D), dtype))
    labels = draw.integers(V, leading).masked_fill(
        draw.mask(draw.pick("ignored", (0.0, 0.3, 1.0)), leading), -100
    )
    others: list[Any] = [draw.laid_out("labels", labels, expand=False)]
    if name == "weighted":
        tensors["weights"] = draw.laid_out("weights", draw.normal(leading, dtype))
    if name == "preferred":
        others.append(draw.integers(V, leading))
    factor = draw.pick("factor", (None, 2.0, "learned", "constant")) if name == "scaled" else None
    if isinstance(factor, str):
        tensors["factor"] = draw.normal((), dtype, draw.choice((1.0, 1.0, 1e-2, 1e-4)))
    for each in tensors:
        if each != "factor" or factor == "learned":
            tensors[each].requires_grad_(each == "factor" or draw.chance(0.8))
    for parameter in head.parameters():
        if draw.chance(0.15):
            parameter.requires_grad_(False)
    if not any(each.requires_grad for each in (*tensors.values(), *head.parameters())):
        tensors["hidden"].requires_grad_()
    options = _options(draw, name)
    draw.note(dtype=dtype, **options)
    way = draw.pick("way", [each for each in WAYS if each not in NOT_OF_MODULES])
    sum_dtype = torch.promote_types(dtype, torch.float32)
    upstream = {"loss": draw_upstream(draw, torch.Size(leading if name == "rows" else ()), sum_dtype)}

    def called(loss_of: Any, head: nn.Module, own: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
        linear = getattr(head, "linear", head)
        module: Any = partial(F.linear, weight=linear.weight, bias=linear.bias) if kind == "partial" else head
        hidden = (own["hidden"], own["gate"]) if kind == "pair" else own["hidden"]
        more = [own[each] for each in ("weights",) if each in own]
        more += [own.get("factor", factor)] if name == "scaled" else []
        found = loss_of(LOSSES[name], module, hidden, *others, *more, **options)
        return {"loss": found[0], **found[1]} if name == "aux" else {"loss": found}

    def leaves_of(head: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
        named = own | {f"head.{each}": parameter for each, parameter in head.named_parameters()}
        return {each: leaf for each, leaf in named.items() if leaf.requires_grad}

    def densely(convert: Callable[[Tensor], Tensor], rows: slice | None = None) -> Any:
        own_head = copy.deepcopy(head)
        if kind == "quantised":  # its forward is bound to the module that it was made for
            own_head.base.forward = own_head.dequantised
        for each in (*own_head.parameters(), *own_head.buffers()):
            if each.is_floating_point():
                each.data = convert(each.data)
        own = {each: convert(t.detach()).requires_grad_(t.requires_grad) for each, t in tensors.items()}
        leaves = leaves_of(own_head, own)
        loss_of, seeds = dense, upstream
        if rows is not None:
            loss_of = partial(_dense_of, rows)
            seeds = {"loss": upstream["loss"].reshape(-1)[rows] if name == "rows" else upstream["loss"]}
        return differentiated(
            lambda part: called(loss_of, own_head, own | _own(part, own)), leaves, seeds, "grad"
        )

    def terms() -> dict[str, Tensor]:
        """Autograd rounds the gradient of a parameter once for each chunk (of a workspace perhaps
        for each row): those gradients, by absolute value."""
        size = options.get("chunk_size", 1 if "workspace" in options else CHUNK_SIZE)
        found = [densely(lambda tensor: tensor.double(), rows) for rows in spans(math.prod(leading), size)]
        learned = [each for each in found[0] if each == "factor" or each.startswith("head.")]
        return {each: torch.stack([part[each].abs() for part in found]).sum(0) for each in learned}

    def run() -> None:
        leaves = leaves_of(head, tensors)
        dtypes = {each: leaf.dtype for each, leaf in leaves.items()}
        dtypes |= {"loss": sum_dtype, "squares": sum_dtype, "rows": torch.int64}
        rounding = torch.finfo(dtype).eps if dtype in HALVES else 0.0
        refs, parts = measured(densely, dtype), terms() if dtype in HALVES else None

        def within(workspace: int | None) -> None:
            own = options if workspace is None else options | {"workspace": workspace}
            function = lambda part: called(chunked_loss, head, tensors | _own(part, tensors), **own)  # noqa: E731
            check(function, leaves, upstream, way, refs, dtypes, sum_dtype, rounding=rounding, terms=parts)

        with_enough_workspace(within, options.get("workspace"))

    return run


def _dense_of(rows: slice, loss_fn: Any, head: Any, hidden: Any, *arguments: Any, **_: Any) -> Any:
    """Some rows alone."""
    parts = hidden if isinstance(hidden, tuple) else (hidden,)
    dims = parts[0].dim() - 1

    def cut(tensor: Any) -> Any:
        return tensor.flatten(0, dims - 1)[rows] if isinstance(tensor, Tensor) and tensor.dim() else tensor

    return dense(loss_fn, head, tuple(map(cut, parts)), *map(cut, arguments))


def _own(leaves: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in leaves.items() if name in tensors}


def _options(draw: Draw, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"mode": draw.choice(("gradient_in_forward", "recompute"))}
    if name == "rows":
        options["mode"] = "recompute"
    if draw.chance(0.7):
        options["chunk_size"] = draw.choice((1, 2, 5, 8, 1000))
    elif draw.chance(0.5):
        options["workspace"] = int(2 ** draw.uniform(10, 18))
    if name == "aux":
        options["has_aux"] = True
    return options
