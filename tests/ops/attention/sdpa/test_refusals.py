"""What is not handed to torch's own kernels, and why: operands and scales that they get wrong."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from lowtide import attn_bias as masks
from lowtide.ops.attention import backend
from lowtide.ops.attention.backend import reason_against_sdpa
from lowtide.ops.attention.definition.operands import AttentionCall, AttentionOptions, Operands
from lowtide.ops.attention.sdpa import alignment

CAUSAL = masks.LowerTriangularMask()


def reason(*shapes_and_strides, mask=None, scale=1.0, dtype=torch.bfloat16, device="cuda"):
    """The reason against torch's kernels, for tensors without data."""
    with FakeTensorMode():
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides in shapes_and_strides
        ]
    operands = Operands(*(tensors if len(tensors) == 3 else tensors * 3))
    return reason_against_sdpa(AttentionCall(operands, mask, None, AttentionOptions(scale)))


REFUSED = {
    "an odd stride of rows": ([((2, 4, 64, 64), (4 * 64 * 65, 64 * 65, 65, 1))], "multiples of 8"),
    "an odd stride of heads": ([((2, 4, 64, 64), (4 * 4097, 4097, 64, 1))], "multiples of 8"),
    "features apart": ([((2, 4, 64, 64), (4 * 8192, 8192, 128, 2))], "side by side"),
    "expanded heads": ([((2, 4, 64, 64), (4096, 0, 64, 1))], "share memory"),
    "expanded batches": ([((2, 4, 64, 64), (0, 4096, 64, 1))], "share memory"),
    "expanded rows": ([((2, 4, 64, 64), (4096, 1024, 0, 1))], "share memory"),
    "rows that overlap": ([((2, 4, 64, 64), (4096, 1024, 8, 1))], "share memory"),
    "many numbers": ([((4, 64, 1 << 17, 64), (1 << 29, 1 << 23, 64, 1))], "2^31"),
    "far apart": ([((4, 4, 64, 64), (1 << 30, 4096, 64, 1))], "2^31"),
    "many heads": ([((1 << 14, 4, 64, 64), (4 * 4096, 4096, 64, 1))], "65535 heads"),
    "many features": ([((2, 4, 64, 264), (4 * 64 * 264, 64 * 264, 264, 1))], "at most 256"),
    "a multiple of 4 features": ([((2, 4, 64, 60), (4 * 4096, 4096, 64, 1))], "multiple of 8"),
}
FINE = ((2, 4, 64, 64), (4 * 4096, 4096, 64, 1))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", REFUSED)
def test_sdpa_refused_operands(name, place):
    """One operand is refused, beside two that are not where sizes allow that."""
    (described,), message = REFUSED[name]
    given = [FINE] * 3 if described[0] == FINE[0] else [described] * 3
    given[place] = described
    assert message in str(reason(*given))


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-300, 1e39])
def test_sdpa_refused_scales(scale):
    for device in ("cpu", "cuda"):
        found = reason(FINE, scale=scale, device=device, dtype=torch.float32)
        assert "normal float32 above 0" in str(found)


def test_sdpa_accepted():
    assert reason(FINE) is None
    assert reason(FINE, mask=CAUSAL, dtype=torch.float16) is None
    heads_last = ((2, 4, 64, 64), (4 * 4096, 64, 256, 1))
    packed = ((2, 4, 64, 64), (3 * 4 * 4096, 64, 3 * 256, 1))
    assert reason(FINE, heads_last, packed) is None
    assert reason(((2, 4, 1, 256), (1024, 256, 256, 1))) is None
    assert reason(FINE, device="cpu", dtype=torch.float32) is None


def described(features):
    return (2, 4, 64, features), (4 * 64 * features, 64 * features, features, 1)


def test_sdpa_unequal_features():
    """cuDNN's kernel for keys of 192 and values of 128 features is the only one "auto" takes."""
    wide, narrow = described(192), described(128)
    assert reason(wide, wide, narrow) is None
    assert reason(wide, wide, narrow, mask=CAUSAL, dtype=torch.float16) is None
    for features in ((narrow, narrow, wide), (described(96), described(96), described(64))):
        assert "as many features of values" in str(reason(*features))
    assert "as many features of values" in str(reason(wide, wide, narrow, device="cpu", dtype=torch.float32))
    odd = narrow[0], (4 * 64 * 129, 64 * 129, 129, 1)
    assert "multiples of 8" in str(reason(wide, wide, odd))


@pytest.mark.parametrize("taken", list(SDPBackend.__members__.values()))
def test_sdpa_unequal_features_if_cudnn_is_taken(taken, monkeypatch):
    monkeypatch.setattr(backend.torch_private, "fused_sdp_choice", lambda *_, **_options: taken.value)
    tensors = (torch.empty(1, 1, 16, features, dtype=torch.bfloat16) for features in (192, 192, 128))
    assert backend._takes_cudnn(tuple(tensors), causal=True) == (taken == SDPBackend.CUDNN_ATTENTION)


@pytest.mark.parametrize("offset", range(9))
@pytest.mark.parametrize("itemsize", [2, 4])
def test_sdpa_refused_addresses(offset, itemsize):
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    memory = torch.zeros(1 << 12, dtype=dtype)
    assert memory.data_ptr() % alignment.BYTES == 0
    tensor = memory[offset:][: 2 * 4 * 8 * 16].view(2, 4, 8, 16)
    foreign = torch.from_dlpack(tensor)  # whose offset is 0
    assert foreign.storage_offset() == 0
    for each in (tensor, foreign, torch.nn.Parameter(foreign)):
        assert alignment.is_aligned(each) == (offset * itemsize % 16 == 0)
        found = alignment.reason_against(each)
        assert (found is None) == (offset * itemsize % 16 == 0)
        assert found is None or "16 bytes" in found
