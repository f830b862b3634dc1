"""linear_cross_entropy with a head for each position (K-dimensional loss), against float64.

Shapes: N rows, D features, V classes, d1 ... dK positions.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from tests.fuzz.calls import check, draw_upstream, draw_workspace, with_enough_workspace
from tests.fuzz.compare import measured
from tests.fuzz.draw import Draw
from tests.fuzz.loss import draw_backend
from tests.fuzz.ways import differentiated, pick_way

NAMES = ("input", "linear_weight", "linear_bias", "logit_scale", "target")


def case(draw: Draw) -> Callable[[], None]:
    dtype = draw.dtype()
    positions = draw.pick("positions", [(1,), (2,), (3,), (2, 2), (1, 3), (2, 1, 2), (0,), (5,)])
    # (Of one class a gradient is 0, in eager torch by luck.)
    N, D, V = draw.size(60), draw.size(90, 1), draw.size(120, 2)
    tensors, ignore_index = _tensors(draw, N, D, V, positions, dtype)
    options: dict[str, Any] = {
        "reduction": draw.choice(("mean", "mean", "sum", "none")),
        "label_smoothing": draw.choice((0.0, 0.0, 0.1)),
        "softcap": draw.choice((None, None, 3.0)),
        "z_loss": draw.choice((0.0, 0.0, 0.1)),
    }
    if "logit_scale" not in tensors:
        options["logit_scale"] = draw.choice((None, None, 0.3))
    if not tensors["target"].is_floating_point():
        options["ignore_index"] = ignore_index
    draw.note(N=N, D=D, V=V, dtype=dtype, **options)
    backend, workspace, way = (
        draw_backend(draw, dtype, small=N * V < 500),
        draw_workspace(draw),
        pick_way(draw),
    )
    sum_dtype = torch.promote_types(dtype, torch.float32)
    shape = torch.Size((N, *positions)) if options["reduction"] == "none" else torch.Size()
    upstream = {"loss": draw_upstream(draw, shape, sum_dtype)}
    leaves = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()} | {"loss": sum_dtype}

    def densely(convert: Callable[[Tensor], Tensor]) -> Any:
        own = {
            name: convert(each.detach()).requires_grad_(each.requires_grad)
            if each.is_floating_point()
            else each
            for name, each in tensors.items()
        }
        trained = {name: own[name] for name in leaves}
        return differentiated(
            lambda part: {"loss": dense(**own | part, **options)}, trained, upstream, "grad"
        )

    def run() -> None:
        refs = measured(densely, dtype)

        def within(workspace: int | None) -> None:
            def function(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
                own = options | {"workspace": workspace, "backend": backend}
                return {"loss": lowtide.linear_cross_entropy(**tensors | leaves, **own)}

            check(function, leaves, upstream, way, refs, dtypes, sum_dtype)

        with_enough_workspace(within, workspace)

    return run


def _tensors(
    draw: Draw, N: int, D: int, V: int, positions: tuple[int, ...], dtype: torch.dtype
) -> tuple[dict[str, Tensor], int | None]:
    """By the names of the arguments; and the index of what is ignored."""
    ignore_index = draw.choice((None, -100, 0))
    ignored = -100 if ignore_index is None else ignore_index
    if probabilities := draw.chance(0.25):
        target = (2 * draw.normal((N, V, *positions), torch.float64)).softmax(1).to(dtype)
    else:
        target = draw.integers(V, (N, *positions), draw.choice((torch.int64, torch.int32)))
        target = target.masked_fill(draw.mask(draw.pick("ignored", (0.0, 0.3, 1.0)), target.shape), ignored)
    made = {
        "input": draw.normal((N, D), dtype),
        "linear_weight": draw.normal((V, *positions, D), dtype, 2 / D**0.5),
        "target": target,
    }
    if draw.chance(0.4):
        made["linear_bias"] = draw.normal((V, *positions), dtype)
    if draw.chance(0.25):
        made["weight"] = draw.uniform_tensor((V,), dtype) + 0.5
    made = {name: draw.laid_out(name, each, expand=name != "target") for name, each in made.items()}
    if draw.chance(0.2):
        made["logit_scale"] = draw.normal((), dtype, 0.5) + 1
    names = [
        name for name in NAMES if name in made and (name != "target" or (probabilities and draw.chance(0.2)))
    ]
    wanted = draw.choice([names, draw.sample(names, draw.randint(1, len(names)))])
    draw.note(wants=",".join(wanted), tensors=",".join(made), target=target)
    return made | {name: made[name].requires_grad_() for name in wanted}, ignore_index


def dense(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    logit_scale: Any = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The definition, in float32 or wider."""
    wide = torch.promote_types(input.dtype, torch.float32)
    z = torch.tensordot(input.to(wide), linear_weight.to(wide), ([1], [linear_weight.dim() - 1]))
    z = z if linear_bias is None else z + linear_bias.to(wide)
    z = z if logit_scale is None else z * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    index = -100 if ignore_index is None else ignore_index
    soft = target.is_floating_point()
    target = target.to(wide) if soft else target.long()
    weight = None if weight is None else weight.to(wide)
    loss = F.cross_entropy(
        z,
        target,
        weight,
        reduction="none" if z_loss else reduction,
        ignore_index=index,
        label_smoothing=label_smoothing,
    )
    if not z_loss:
        return loss
    ignored = torch.zeros_like(loss, dtype=torch.bool) if soft else target == index
    loss = loss + (z_loss * z.logsumexp(1).square()).masked_fill(ignored, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if soft:
        return loss.sum() / (loss.shape[0] * math.prod(loss.shape[1:]))
    share = (~ignored).to(wide)
    return loss.sum() / (share if weight is None else share * weight[target.masked_fill(ignored, 0)]).sum()
