"""linear_cross_entropy: sizes, dtypes, layouts, options, workspaces, backends and derivatives.

Shapes: N tokens, D features, V classes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.calls import check, draw_upstream, draw_workspace, with_enough_workspace
from tests.fuzz.compare import References, compare, mapped, measured, must_raise, widened
from tests.fuzz.draw import FLOATS, Draw
from tests.fuzz.loss_inputs import make_inputs, sizes
from tests.fuzz.ways import TRANSFORMS, pick_way, second_order
from tests.support.budgets import Inputs, dense, dense_logits, differentiate
from tests.support.loss import fused, references


def draw_options(draw: Draw, inputs: Inputs, ignore_index: int | None) -> dict[str, Any]:
    options = {
        "reduction": draw.choice(("mean", "mean", "sum", "none")),
        "label_smoothing": draw.choice((0.0, 0.0, 0.1, 1.0)),
        "softcap": draw.choice((None, None, 0.5, 30.0)),
        "z_loss": draw.choice((0.0, 0.0, 1e-4, 0.5)),
    }
    if inputs.logit_scale is None:
        options["logit_scale"] = draw.choice((None, None, 0.3, -2.0, 0.0))
    if not inputs.probabilities:
        options["ignore_index"] = ignore_index
    if options["reduction"] == "mean" and draw.chance(0.2):
        options["normalizer"] = draw.choice((1, 0.5, 3.7, 1000))
    draw.note(**options)
    return options


def truths_rounding(inputs: Inputs, way: str = "", **chain: Any) -> float:
    """The relative error of exp(z - logsumexp), where both are large: of float64 itself, and of a
    backward that computes z once more, in other pieces."""
    again = chain.get("reduction", "none") == "none" or way in TRANSFORMS
    if not (again or inputs.input.dtype == torch.float64) or not inputs.input.numel():
        return 0.0
    logits_NV = dense_logits(inputs, logit_scale=chain.get("logit_scale")).detach()
    return (1 + 3 * again) * torch.finfo(inputs.sum_dtype).eps * logits_NV.abs().max().item()


def draw_backend(draw: Draw, dtype: torch.dtype, *, small: bool) -> str:
    choices = ["auto", "auto", "auto", "torch"]
    if dtype != torch.float64 and (draw.device == "cuda" or (small and draw.chance(0.1))):
        choices = ["triton"]
    return draw.pick("backend", choices)


def case(draw: Draw) -> Callable[[], None]:
    dtype, kind = draw.dtype(), draw.random()
    tiny = kind < 0.05
    ignore_index = draw.choice((None, -100, 0, 1, -1))
    inputs = make_inputs(draw, *sizes(draw, tiny=tiny), dtype, ignore_index=ignore_index)
    options, workspace = draw_options(draw, inputs, ignore_index), draw_workspace(draw)
    backend = draw_backend(
        draw, dtype, small=inputs.linear_weight.numel() < 5000 and inputs.input.numel() < 2000
    )
    shape = inputs.leading if options["reduction"] == "none" else torch.Size()
    upstream = draw_upstream(draw, shape, inputs.sum_dtype)
    leaves = inputs.leaves()
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()} | {"loss": inputs.sum_dtype}

    def function(workspace: int | None, **more: Any) -> Any:
        def loss(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"loss": fused(replace(inputs, **leaves), workspace=workspace, **options | more)}

        return loss

    if 0.05 < kind < 0.07:
        other = draw.pick("other", [each for each in FLOATS if each != dtype])
        wrong = replace(inputs, linear_weight=inputs.linear_weight.detach().to(other))
        return lambda: must_raise(lambda: fused(wrong, **options), f"a weight of {other}")
    if tiny and dtype in (torch.float32, torch.float64):
        draw.note("second-order")
        return lambda: check_second_order(inputs, function(None), upstream, options)
    if 0.07 < kind < 0.12 and dtype == torch.float32:
        return autocast(draw, inputs, function, upstream, options, dtypes)
    way = pick_way(draw)

    def run() -> None:
        refs = widened(
            References(*references(inputs, upstream, **options)),
            lambda convert: differentiate(dense, mapped(inputs, convert), upstream.double(), **options),
        )
        with_enough_workspace(
            lambda room: check(
                function(room, backend=backend),
                leaves,
                {"loss": upstream},
                way,
                refs,
                dtypes,
                inputs.sum_dtype,
                rounding=truths_rounding(inputs, way, **options),
            ),
            workspace,
        )

    return run


def autocast(
    draw: Draw, inputs: Inputs, function: Any, upstream: Tensor, options: dict[str, Any], dtypes: Any
) -> Callable[[], None]:
    """Products of half-precision operands; eager torch is the same of rounded leaves."""
    half = draw.pick("autocast", (torch.bfloat16, torch.float16))

    def run() -> None:
        exact, _, magnitude = references(inputs, upstream, **options)
        _, eager, _ = references(inputs.to(half), upstream, **options)
        with torch.autocast(draw.device, half):
            check(
                function(None),
                inputs.leaves(),
                {"loss": upstream},
                "grad",
                References(exact, eager, magnitude),
                dtypes,
                inputs.sum_dtype,
                rounding=torch.finfo(half).eps,
            )

    return run


def check_second_order(inputs: Inputs, function: Any, upstream: Tensor, options: dict[str, Any]) -> None:
    leaves, dtype = inputs.leaves(), inputs.input.dtype

    def densely(convert: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        own = {name: convert(leaf.detach()).requires_grad_() for name, leaf in leaves.items()}
        wide = next(iter(own.values())).dtype
        rest = replace(inputs.to(wide), **own)
        return second_order(
            lambda each: {"loss": dense(replace(rest, **each), **options)}, own, {"loss": upstream}
        )

    found = second_order(function, leaves, {"loss": upstream})
    compare(
        found,
        measured(densely, dtype, cancels=True),
        {name: leaf.dtype for name, leaf in leaves.items()},
        inputs.sum_dtype,
    )
