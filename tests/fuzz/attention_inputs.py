"""Queries, keys, values, biases, masks and options of attention.

Shapes: B batches, M queries, N keys, H query heads, G key heads, K features, E of values.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowtide import attn_bias
from tests.fuzz.draw import FLOATS, Draw
from tests.ops.attention.helpers import Case


def draw_case(draw: Draw, signature: str, dtype: torch.dtype) -> tuple[Case, bool]:
    """And whether it is tiny."""
    tiny, cuda = draw.chance(0.06), draw.device == "cuda"
    most, largest = (300, 20) if tiny else (4e6, 4096) if cuda else (6e4, 600)
    while True:
        B, M, N = draw.size(3, 1), draw.size(largest), draw.size(largest)
        N = M if draw.chance(0.4) else N
        G = 1 if signature == "three" else draw.randint(1, 3)
        H = G if signature == "three" else G * draw.choice((1, 1, 2, 3))
        K = draw.choice(
            (8, 16, 32, 64, 128, draw.size(512, 1), draw.size(40, 1), 0 if draw.chance(0.2) else 72)
        )
        E = draw.choice((K, K, K, draw.size(96, 1))) or 4
        if most >= B * H * M * N and 4 * most >= B * H * (M + N) * (K + E):
            break
    spread = draw.choice((1.5, 1.5, 0.1, 8.0))
    shapes = {"query": (B, M, H, K), "key": (B, N, G, K), "value": (B, N, G, E)}
    scales = (spread, 1.0, 1.0)
    tensors = {name: draw.normal(shape, dtype, scale) for (name, shape), scale in zip(shapes.items(), scales)}
    tensors = laid_out(draw, tensors)
    draw.note(B=B, M=M, N=N, H=H, G=G, K=K, E=E, dtype=dtype, spread=spread)
    bias = _bias(draw, B, H, M, N, dtype) if signature != "five" and draw.chance(0.35) else None
    mask = _mask(draw, signature, B, M, N) if draw.chance(0.5) else None
    names = draw.choice([[*tensors], [*tensors], draw.sample([*tensors], draw.randint(1, 3))])
    if bias is not None and bias.dtype != torch.bool and draw.chance(0.6):
        names = draw.choice([[*names, "bias"], ["bias"]])
    draw.note(wants=",".join(names))
    made = Case(**tensors, bias=bias, mask=mask, options=_options(draw, signature))
    return replace(made, **{name: getattr(made, name).requires_grad_() for name in names}), tiny


def laid_out(draw: Draw, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As callers have them: heads first or last, views of a packed product, slices of tensors."""
    query, key, value = tensors.values()
    kind = draw.pick("layout", ("contiguous", "heads", "heads", "packed", "sliced", "any", "any"))
    if kind == "packed" and query.shape == key.shape == value.shape:
        at = draw.choice((2, 3, 0))
        return dict(zip(tensors, torch.stack([query, key, value], at).unbind(at)))
    if kind == "heads":
        return {name: each.transpose(1, 2).contiguous().transpose(1, 2) for name, each in tensors.items()}
    if kind == "sliced":
        offset, after = draw.randint(0, 8), draw.randint(0, 8)
        draw.note(offset=offset, after=after)
        return {name: draw.within(each, 3, offset, after) for name, each in tensors.items()}
    if kind == "any":
        return {name: draw.laid_out(name, each) for name, each in tensors.items()}
    return tensors


def _bias(draw: Draw, B: int, H: int, M: int, N: int, dtype: torch.dtype) -> Tensor:
    shape = tuple(size if draw.chance(0.6) else 1 for size in (B, H, M, N))
    kind = draw.pick("bias", ("numbers", "numbers", "bool", "-inf", "-1e9", "other dtype"))
    if kind == "bool":
        return draw.laid_out("bias", draw.mask(0.7, shape), expand=False)
    own = draw.choice(FLOATS) if kind == "other dtype" else dtype
    bias = draw.normal(shape, own)
    if kind[0] == "-":
        lowest = -torch.inf if kind == "-inf" else max(float(kind), torch.finfo(own).min)
        bias = bias.masked_fill(draw.mask(0.4, shape), lowest)
    draw.note(bias=bias)
    return draw.laid_out("bias", bias)


def _mask(draw: Draw, signature: str, B: int, M: int, N: int) -> Any:
    """Torch's signature has one."""
    causal = attn_bias.LowerTriangularMask()
    local = attn_bias.LocalAttentionFromBottomRightMask(draw.randint(0, 9), draw.randint(0, 9))
    choices = [causal, causal, attn_bias.LowerTriangularFromBottomRightMask(), local]
    if B == 1:
        parts = draw.randint(1, 4)
        cuts = [sorted(draw.randint(0, size) for _ in range(parts - 1)) for size in (M, N)]
        lengths = [[b - a for a, b in zip([0, *cut], [*cut, size])] for cut, size in zip(cuts, (M, N))]
        blocks = attn_bias.BlockDiagonalMask.from_seqlens(*lengths)
        choices += [blocks, blocks.make_causal()]
    return draw.pick("mask", [causal] if signature == "torch" else choices)


def _options(draw: Draw, signature: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if draw.chance(0.3):
        options["scale"] = draw.choice((0.3, 1.0, 0.0, -0.5, None))
    if signature != "torch":
        if draw.chance(0.15):
            options["softcap"] = draw.choice((2.0, 30.0))
        if draw.chance(0.15):
            options["window"] = (draw.choice((None, -1, 0, 3, 40)), draw.choice((None, -1, 0, 5)))
        if draw.chance(0.15):
            options |= {"p": draw.choice((0.1, 0.5, 0.9)), "seed": draw.choice((0, 7, 2**40 + 1))}
    draw.note(**options)
    return options
