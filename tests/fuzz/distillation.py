"""The three divergences of lowtide.distillation: sizes down to no rows, layouts, options, dtypes.

Shapes: N rows, D_s and D_t features of student and teacher, V classes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.calls import check, draw_upstream, draw_workspace, with_enough_workspace
from tests.fuzz.compare import References, compare, mapped, measured, widened
from tests.fuzz.draw import Draw
from tests.fuzz.ways import pick_way, second_order
from tests.ops.distillation.helpers import DIVERGENCES, Inputs, dense, differentiate, fused, references


def make_inputs(draw: Draw, dtype: torch.dtype, most: float) -> Inputs:
    while True:
        N, V = draw.size(600), draw.size(2000, 1)
        D_s, D_t = draw.size(200, 1), draw.size(200, 1)
        if most / 8 >= N * V and N * V * max(D_s, D_t) <= most and V * max(D_s, D_t) <= most / 8:
            break
    spread = draw.pick("spread", (2.0, 2.0, 0.0, 8.0))
    part = draw.choice([each for each in (1, 2, 3) if N % each == 0])
    leading = draw.choice([(N,), (N,), (part, N // part)])
    teacher = draw.choice((dtype, dtype, torch.float32)) if dtype != torch.float64 else dtype
    shapes = {
        "student_input": ((*leading, D_s), dtype, 1.0),
        "student_weight": ((V, D_s), dtype, spread / D_s**0.5),
        "teacher_input": ((*leading, D_t), teacher, 1.0),
        "teacher_weight": ((V, D_t), teacher, spread / D_t**0.5),
    }
    if draw.chance(0.4):
        shapes["student_bias"] = ((V,), dtype, 1.0)
    if draw.chance(0.4):
        shapes["teacher_bias"] = ((V,), teacher, 1.0)
    made = {name: draw.laid_out(name, draw.normal(*each)) for name, each in shapes.items()}
    if draw.chance(0.4):
        made["ignored"] = draw.laid_out(
            "ignored", draw.mask(draw.pick("share", (0.3, 0.9, 1.0)), leading), expand=False
        )
    names = [name for name in ("student_input", "student_weight", "student_bias") if name in made]
    wanted = draw.choice([names, draw.sample(names, draw.randint(1, len(names)))])
    draw.note(N=N, V=V, D_s=D_s, D_t=D_t, leading=list(leading), dtype=dtype, teacher=teacher)
    draw.note(wants=",".join(wanted), tensors=",".join(made))
    return Inputs(**made | {name: made[name].requires_grad_() for name in wanted})


def case(draw: Draw) -> Callable[[], None]:
    dtype, tiny = draw.dtype(), draw.chance(0.05)
    inputs = make_inputs(draw, dtype, 5e3 if tiny else 1e6 if draw.device == "cpu" else 3e8)
    divergence = draw.pick("divergence", DIVERGENCES)
    options: dict[str, Any] = {
        "temperature": draw.choice((1.0, 1.0, 0.5, 4.0)),
        "reduction": draw.choice(("mean", "sum", "none")),
        "student_softcap": draw.choice((None, None, 3.0, 30.0)),
        "teacher_softcap": draw.choice((None, None, 5.0)),
    }
    draw.note(**options)
    way, workspace = pick_way(draw), draw_workspace(draw)
    sum_dtype = torch.promote_types(dtype, torch.float32)
    shape = inputs.leading if options["reduction"] == "none" else torch.Size()
    upstream = draw_upstream(draw, shape, sum_dtype)
    leaves = inputs.leaves()
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()} | {"loss": sum_dtype}

    def function(workspace: int | None) -> Any:
        def loss(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"loss": fused(replace(inputs, **leaves), divergence, workspace=workspace, **options)}

        return loss

    def densely(convert: Callable[[Tensor], Tensor]) -> Any:
        return differentiate(dense, mapped(inputs, convert), divergence, upstream.double(), **options)

    def run() -> None:
        refs = widened(References(*references(inputs, divergence, upstream, **options)), densely)
        # A term is a difference of two log-probabilities: where they are equal, their roundings are
        # left.
        terms = inputs.student_input[..., 0].numel() if options["reduction"] == "sum" else 1
        refs.magnitude["loss"].clamp_(min=max(1, terms))
        if (
            inputs.student_weight.shape[0] == 1 and inputs.student_input.numel()
        ):  # all is 0, of terms that are not
            for name, leaf in leaves.items():
                others = inputs.student_weight if name == "student_input" else inputs.student_input
                size = upstream.abs().amax() * others.detach().double().abs().amax() * leaf.shape[-1]
                refs.magnitude[name].clamp_(min=size.item())
        with_enough_workspace(
            lambda room: check(function(room), leaves, {"loss": upstream}, way, refs, dtypes, sum_dtype),
            workspace,
        )

    def twice() -> None:
        def dense_twice(convert: Callable[[Tensor], Tensor]) -> Any:
            own = mapped(inputs, convert)
            loss = lambda part: {"loss": dense(replace(own, **part), divergence, **options)}  # noqa: E731
            return second_order(loss, own.leaves(), {"loss": upstream})

        found = second_order(function(None), leaves, {"loss": upstream})
        compare(found, measured(dense_twice, dtype, cancels=True), dtypes, sum_dtype)

    if tiny and dtype in (torch.float32, torch.float64):
        draw.note("second-order")
        return twice
    return run
