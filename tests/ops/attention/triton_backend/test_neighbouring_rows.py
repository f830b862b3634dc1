"""Few features, and operands whose rows are neighbours in memory, not their features.

ptxas confuses the descriptors of tiles of two widths. So tiles of 32 features are for operands of
which no other order is (tile_sizes.py). Elsewhere a card read beyond its shared memory.
"""

from dataclasses import replace

import pytest
import torch

from tests.ops.attention.helpers import INTERPRETED, check, differentiate, make_case, make_upstream, ours
from tests.support.extended import all_extended_but
from tests.support.loss import skip_unless_runnable

pytest.importorskip("triton")

from lowtide.ops.attention.definition.operands import AttentionOptions, Operands
from lowtide.ops.attention.triton_backend import launch_small_problems
from lowtide.ops.attention.triton_backend.launch import kernel_call

pytestmark = INTERPRETED

OPERANDS = ["query", "key", "value", "grad_output"]


def by_features(tensor):
    """The same numbers [B, M, H, K], in memory as [B, H, K, M]."""
    return tensor.detach().permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).requires_grad_(tensor.is_leaf)


@pytest.mark.parametrize("transposed", OPERANDS)
@pytest.mark.parametrize(
    ("K", "E"), all_extended_but([(32, 32), (1, 16)], [(32, 32), (16, 1), (1, 16), (128, 128), (256, 256)])
)
@pytest.mark.parametrize("few", [False, True])
def test_values(device, monkeypatch, few, K, E, transposed):
    skip_unless_runnable("triton", device)
    if few:
        monkeypatch.setattr(launch_small_problems, "FEWEST_PROBLEMS", 1)
    times = 4 if device == "cuda" and not few else 1
    for dtype in (torch.float32, torch.bfloat16) if device == "cuda" else (torch.float32,):
        case = make_case(
            3, 37 * times, 53 * times, 2, K=K, E=E, dtype=dtype, device=device, bias=(0, 1, 1, 1)
        )
        of_out, of_lse = make_upstream(case)
        if transposed == "grad_output":
            of_out = by_features(of_out)
        else:
            case = replace(case, **{transposed: by_features(getattr(case, transposed))})
        check(differentiate(ours, case, (of_out, of_lse), backend="triton"), case, (of_out, of_lse))


@pytest.mark.parametrize("transposed", [None, *OPERANDS])
def test_width_of_tiles(transposed):
    operands = {name: torch.empty(2, 3, 40, 16) for name in OPERANDS}
    if transposed is not None:
        operands[transposed] = torch.empty(2, 3, 16, 40).mT
    grad_output = operands.pop("grad_output")
    call = kernel_call(Operands(**operands), AttentionOptions(scale=1.0))._replace(grad_output=grad_output)
    for kernel in ("forward", "problem forward", "problem gradient"):
        tile = call.find_tile(kernel)
        assert tile.K == tile.E == (32 if transposed is None else 64)


@pytest.mark.parametrize("transposed", [None, *OPERANDS])
@pytest.mark.parametrize("K", [16, 128])
def test_height_of_tiles_beside_a_bias(transposed, K):
    """A transposed tile is as wide as it has rows."""
    operands = {name: torch.empty(2, 3, 40, K, dtype=torch.float16) for name in OPERANDS}
    if transposed is not None:
        operands[transposed] = torch.empty(2, 3, K, 40, dtype=torch.float16).mT
    grad_output = operands.pop("grad_output")
    bias = torch.empty(2, 3, 40, 40)
    call = kernel_call(Operands(**operands, bias=bias), AttentionOptions(scale=1.0))
    call = call._replace(grad_output=grad_output)
    heights = [min(call.tile(kernel)[:2]) for kernel in ("forward", "query", "key and value")]
    assert heights[0] == 64
    assert heights[1] == (32 if transposed is None and K == 16 else 64)
    assert heights[2] == (32 if transposed is None else 64)
