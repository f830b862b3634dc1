"""dk and dv where few tiles of keys would leave the card idle: by parts of the queries.

The same truth and budgets as other kernels have.

Shapes: B batches, M queries, N keys, H query heads, G key heads, K features of queries and keys, E
of values.
"""

import pytest
import torch

from lowtide import attn_bias as masks
from lowtide.ops.attention.triton_backend import launch_recomputed, launch_stored_scores, strips
from lowtide.ops.attention.triton_backend.parts_of_queries import part_count
from tests.ops.attention.helpers import (
    INTERPRETED,
    check_same_bits,
    check_triton,
    make_case,
    peak_of_backward,
)
from tests.support.extended import all_extended_but

pytestmark = INTERPRETED

CASES = {
    "plain": {},
    "float32": {"dtype": torch.float32},
    "heads that share keys": {"B": 2, "H": 4, "G": 2, "M": 1100},
    "values of fewer features": {"E": 9},
    "causal": {"M": 1100, "N": 1100, "mask": masks.LowerTriangularMask()},
    "sequences": {"mask": masks.BlockDiagonalMask.from_seqlens([3, 470, 7], [1, 52, 20])},
    "bias of keys": {"bias": (1, 0, 0, 1), "p": 0.3, "seed": 4},
    "bias of keys, float32": {"bias": (0, 1, 0, 1), "softcap": 3.0, "dtype": torch.float32},
    "bias of all scores": {"bias": (1, 1, 1, 1)},
    "bias of all scores, float32": {"bias": (1, 0, 1, 1), "dtype": torch.float32},
    "dk and dv apart": {"K": 256, "E": 100},
    "from stored scores": {"M": 1100, "K": 296, "E": 24},
    "from stored scores, float32": {"K": 136, "H": 1, "dtype": torch.float32, "bias": (1, 1, 0, 1)},
    "strips of keys": {"N": 300, "bias": (0, 1, 1, 1), "softcap": 3.0, "dtype": torch.float32},
}
QUICK = ["plain", "float32", "heads that share keys", "bias of keys, float32", "bias of all scores, float32"]


@pytest.fixture
def parts(monkeypatch):
    """How many parts each launch had."""
    found = []

    def count(programs, tiles):
        found.append(part_count(programs, tiles))
        return found[-1]

    for module in (launch_recomputed, launch_stored_scores):
        monkeypatch.setattr(module, "part_count", count)
    return found


def case_of(name, device):
    """float16, as the interpreter rounds to bfloat16 towards 0."""
    sizes = {"B": 1, "M": 480, "N": 73, "H": 2, "K": 16, "dtype": torch.float16}
    return make_case(**(sizes | CASES[name]), device=device)


@pytest.mark.parametrize("name", all_extended_but(QUICK, CASES))
def test_values(device, parts, monkeypatch, name):
    if name == "strips of keys":
        for limit in ("ROOM", "FEW"):
            monkeypatch.setattr(strips, limit, 1)
    check_triton(case_of(name, device))
    assert parts
    assert min(parts) > 1


def test_same_call_same_bits(device, parts):
    check_same_bits(case_of("plain", device))
    assert min(parts) > 1


@pytest.mark.parametrize(
    ("programs", "tiles", "expected"), [(1, 1000, 192), (7, 62, 15), (96, 100, 2), (97, 100, 1), (1, 7, 1)]
)
def test_number_of_parts(programs, tiles, expected):
    """Until the card is full, but a part has at least four tiles."""
    assert part_count(programs, tiles) == expected


def test_memory(device, parts):
    """Sums of parts take what one tile a program takes."""
    case = make_case(B=1, M=4096, N=64, H=1, K=16, dtype=torch.float16, device=device)
    peak, gradients = peak_of_backward(case)
    (count,) = set(parts)
    rows = 3 * 4 * 4096
    assert count > 1
    assert peak.bytes <= gradients + 2 * count * 64 * 16 * 4 + rows + (64 << 10)
