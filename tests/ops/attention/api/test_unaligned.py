"""Half-precision operands whose rows begin off 16 bytes are copied where a call has many scores.

On the CPU the kernels run through the interpreter. Shapes: B batches, M queries, N keys, H heads, K
features of queries and keys, E of values.
"""

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention import aligned, remembered
from tests.ops.attention.helpers import INTERPRETED, check_triton, make_case, ours
from tests.support.graphs import needs_tracing
from tests.support.loss import skip_unless_runnable

pytestmark = INTERPRETED


def in_wider_rows(tensor, more):
    wider = torch.nn.functional.pad(tensor.detach(), (0, more))
    return wider[..., : tensor.shape[-1]].requires_grad_(tensor.requires_grad)


def one_later(tensor):
    flat = torch.cat([tensor.new_zeros(1), tensor.detach().flatten()])
    return flat[1:].view(tensor.shape).requires_grad_(tensor.requires_grad)


def case_of(device, **sizes):
    given = {"B": 1, "M": 66, "N": 70, "H": 2, "K": 16, "dtype": torch.float16, "device": device}
    return make_case(**(given | sizes))


def copies(case, backend="triton"):
    return aligned.aligned_copies(case.query, case.key, case.value, backend, rows_at=1)


@pytest.mark.parametrize(
    "sizes",
    [
        {"K": 15},
        {"K": 13, "E": 24},
        {"K": 16, "E": 9},
        {"K": 15, "G": 1, "mask": masks.LowerTriangularFromBottomRightMask()},
        {"K": 15, "bias": (0, 1, 1, 1), "p": 0.3, "seed": 5, "softcap": 3.0},
        {"K": 12, "M": 256, "N": 260, "H": 1},
    ],
    ids=str,
)
def test_values(device, sizes):
    skip_unless_runnable("triton", device)
    case = case_of(device, **sizes)
    assert {each.shape[-1] % 8 for each in copies(case)} == {0}
    check_triton(case)
    out, _ = ours(case, backend="triton")
    assert out.is_contiguous()


@pytest.mark.parametrize("change", [one_later, lambda each: in_wider_rows(each, 1)], ids=["later", "wider"])
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_values_of_one_unaligned_operand(device, place, change):
    skip_unless_runnable("triton", device)
    case = case_of(device)
    case = replace(case, **{place: change(getattr(case, place))})
    found = copies(case)
    for name, copy in zip(("query", "key", "value"), found):
        assert (copy is getattr(case, name)) == (name != place)
    check_triton(case)


@pytest.mark.parametrize(
    ("step", "dtype", "M", "N", "slow"),
    [
        (1, torch.bfloat16, 64, 64, True),
        (1, torch.bfloat16, 63, 4096, False),
        (1, torch.bfloat16, 4096, 1, False),
        (2, torch.float16, 256, 256, True),
        (4, torch.float16, 255, 999, False),
        (8, torch.float16, 999, 999, False),
        (1, torch.float32, 999, 999, False),
    ],
)
def test_which_calls_are_slow(step, dtype, M, N, slow):
    assert aligned.is_slow(step, dtype, M, N) == slow


def test_what_is_not_copied(device):
    case = case_of(device, K=15)
    assert copies(case, "torch") is None
    assert copies(case, "reference") is None
    if device == "cpu":
        assert copies(case, "auto") is None
    # What is expanded, or lies by columns, keeps its features, so the others do.
    for K, copied in ((15, False), (16, True)):
        case = case_of(device, K=K)
        query = in_wider_rows(case.query, 1)
        expanded = case.key.detach()[:, :, :1].expand(-1, -1, 2, -1)
        by_columns = case.key.detach().movedim(3, 1).contiguous().movedim(1, 3)
        for key in (expanded, by_columns):
            found = copies(replace(case, query=query, key=key))
            assert (found is not None) == copied
            assert found is None or found[1] is key
            check_triton(replace(case, query=query, key=key))


def test_errors_name_the_callers_features(device):
    skip_unless_runnable("triton", device)
    case = case_of(device, K=15)
    key = case.key[..., :13]
    with pytest.raises(ValueError, match="15"):
        lowtide.memory_efficient_attention(case.query, key, case.value, backend="triton")


def test_copies_are_remembered(device):
    skip_unless_runnable("triton", device)
    case = case_of(device, K=15)
    remembered.forget()
    first, second = (ours(case, backend="triton")[0] for _ in range(2))
    (entry,) = remembered._calls.values()
    assert type(entry).__name__ == "RecordedCall"
    assert torch.equal(first, second)


@needs_tracing
def test_compiled(device):
    """A graph copies odd features, whatever the number of queries and keys."""
    skip_unless_runnable("triton", device)
    case = case_of(device, K=15)

    def attend(query, key, value):
        return lowtide.memory_efficient_attention(query, key, value, backend="triton")

    given = case.query, case.key, case.value
    torch._dynamo.reset()
    found = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)
    assert torch.equal(found, attend(*given))
    gradients = (torch.autograd.grad(out.sum(), given) for out in (found, attend(*given)))
    assert all(map(torch.equal, *gradients))
