"""Tensors for the loss and for log-probabilities, in any layout.

Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tests.fuzz.draw import FLOATS, Draw
from tests.support.budgets import Inputs


def sizes(draw: Draw, *, tiny: bool = False) -> tuple[int, int, int]:
    """Draw sizes whose products and logits take at most some milliseconds."""
    products, most = (5e3, 40) if tiny else (1e6, 3000) if draw.device == "cpu" else (3e8, 9000)
    while True:
        N, D, V = draw.size(most), draw.size(700, 1), draw.size(5000, 1)
        if products >= N * D * V and products / 8 >= N * V and products / 8 >= D * V:
            return N, D, V


def make_inputs(
    draw: Draw,
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype,
    *,
    ignore_index: int | None = -100,
    loss: bool = True,
) -> Inputs:
    """Draw leaves in any layout, some with gradients; some logits are confident, some extreme."""
    spread = draw.pick("spread", (2.0, 2.0, 0.0, 12.0, 1e4 if dtype != torch.float16 else 100.0))
    probabilities = loss and draw.chance(0.2)
    bias, learned_scale = draw.chance(0.4), draw.chance(0.2)
    x_ND, w_VD = draw.normal((N, D), dtype), draw.normal((V, D), dtype, spread / max(D, 1) ** 0.5)
    leading = _leading(draw, N)
    target_N = _targets(draw, N, V, -100 if ignore_index is None else ignore_index)
    if spread == 12.0 and not probabilities and N:  # confident: the weight's row is much of the input
        x_ND = (x_ND.double() / 4 + w_VD.double()[target_N.long().clamp(0, V - 1)] / 12).to(dtype)
    target: Tensor = target_N.view(leading)
    if probabilities:
        own = draw.choice((dtype, torch.float32)) if dtype != torch.float64 else dtype
        target = (3 * draw.normal((*leading, V), torch.float64)).softmax(-1).to(own)
    else:
        choices = [torch.int64, torch.int64, torch.int32]
        if loss and V <= 256 and not (target < 0).any():
            choices.append(torch.uint8)
        target = target.to(draw.choice(choices))
    weight = None
    if loss and draw.chance(0.25):
        wide = dtype == torch.float64
        kind = draw.choice((dtype, torch.float32 if not wide else dtype))
        weight = draw.uniform_tensor((V,), kind) + 0.5
    inputs = {
        "input": draw.laid_out("input", x_ND.view(*leading, D)),
        "linear_weight": draw.laid_out("linear_weight", w_VD),
        "target": draw.laid_out("target", target, expand=False),
        "linear_bias": draw.laid_out("linear_bias", draw.normal((V,), dtype)) if bias else None,
        "weight": None if weight is None else draw.laid_out("weight", weight),
    }
    made = Inputs(**inputs)
    if loss and draw.chance(0.2):
        made = replace(made, row_weight=_row_weight(draw, made, ignore_index))
    if learned_scale:
        made = replace(made, logit_scale=draw.normal((), dtype, 0.5) + 1)
    draw.note(N=N, D=D, V=V, dtype=dtype, leading=list(leading), target=target, learned_scale=learned_scale)
    draw.note(bias=bias, class_weight=weight is not None and weight.dtype)
    draw.note(row_weight=made.row_weight is not None and made.row_weight.dtype)
    return _with_gradients(draw, made)


def _leading(draw: Draw, N: int) -> tuple[int, ...]:
    kind = draw.random()
    if kind < 0.6:
        return (N,)
    if kind < 0.7 and N == 1:
        return ()
    part = draw.choice([each for each in (1, 2, 3, 5, 7) if N % each == 0])
    return draw.choice([(part, N // part), (N // part, part), (1, part, N // part)])


def _targets(draw: Draw, N: int, V: int, ignored: int) -> Tensor:
    target_N = draw.integers(V, (N,))
    share = draw.pick("ignored", (0.0, 0.0, 0.3, 0.9, 1.0))
    return target_N.masked_fill(draw.mask(share, (N,)), ignored)


def _row_weight(draw: Draw, inputs: Inputs, ignore_index: int | None) -> Tensor:
    """Draw weights of either sign, some of them 0; those of ignored rows may be NaN."""
    weight = draw.normal(inputs.leading, draw.choice(FLOATS)).masked_fill(draw.mask(0.2, inputs.leading), 0)
    unused = draw.pick("unused-weights", (1.0, torch.nan))
    ignored = inputs.ignored_N(ignore_index).view(inputs.leading)
    return draw.laid_out("row_weight", weight.masked_fill(ignored, unused), expand=unused == 1.0)


def _with_gradients(draw: Draw, inputs: Inputs) -> Inputs:
    names = [
        name
        for name in ("input", "linear_weight", "linear_bias", "logit_scale")
        if getattr(inputs, name) is not None
    ]
    wanted = draw.choice([names, names, names, draw.sample(names, draw.randint(1, len(names)))])
    if inputs.probabilities and draw.chance(0.2):
        wanted = [*wanted, "target"]
    draw.note(wants=",".join(wanted))
    return replace(inputs, **{name: getattr(inputs, name).requires_grad_() for name in wanted})
