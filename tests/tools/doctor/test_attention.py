"""The doctor's answer about a call of attention is what runs."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.ops.attention import backend, dispatch
from lowtide.ops.attention.operator import ops
from lowtide.tools.doctor.attention import LINES, AskedAttentionCall, Layout, Mask, table

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "ways.md"
SMALL = AskedAttentionCall(M=12, H=4, K=8, dtype=torch.float32)
CALLS = (
    SMALL,
    replace(SMALL, mask=Mask.CAUSAL, G=2),
    replace(SMALL, mask=Mask.CAUSAL_FROM_BOTTOM_RIGHT, N=20),
    replace(SMALL, mask=Mask.CAUSAL_BLOCKS),
    replace(SMALL, bias=(1, 4, 1, 12)),
    replace(SMALL, bias=(1, 4, 12, 12), bias_gradient=False, dtype=torch.bfloat16),
    replace(SMALL, dropout=0.5),
    replace(SMALL, softcap=5.0),
    replace(SMALL, window=(3, -1)),
    replace(SMALL, with_logsumexp=True),
    replace(SMALL, E=4),
    replace(SMALL, M=0),
    replace(SMALL, layout=Layout.BMK, H=1),
    replace(SMALL, layout=Layout.BMGHK, G=2),
    replace(SMALL, layout=Layout.BHMK, G=2),
    replace(SMALL, backend="torch"),
    replace(SMALL, backend="reference"),
)


def run(call):
    """The call itself, with zeros."""
    N = call.M if call.N is None else call.N
    G = call.H if call.G is None else call.G
    E = call.K if call.E is None else call.E
    shapes = {
        Layout.BMHK: lambda M, H, K: (call.B, M, H, K),
        Layout.BMK: lambda M, H, K: (call.B, M, K),
        Layout.BMGHK: lambda M, H, K: (call.B, M, G, H // G, K),
        Layout.BHMK: lambda M, H, K: (call.B, H, M, K),
    }
    sizes = ((call.M, call.H, call.K), (N, G, call.K), (N, G, E))
    tensors = [
        torch.zeros(shapes[call.layout](*each), dtype=call.dtype, requires_grad=True) for each in sizes
    ]
    if call.layout is Layout.BHMK:
        return lowtide.scaled_dot_product_attention(*tensors, enable_gqa=True)
    bias = None
    if call.bias is not None:
        bias = torch.zeros(call.bias, dtype=call.dtype, requires_grad=call.bias_gradient)
    if call.mask is not None:
        bias = call.mask.of(call.M, N)
    function = lowtide.memory_efficient_attention
    if call.with_logsumexp:
        function = lowtide.memory_efficient_attention_with_lse
    options = {"softcap": call.softcap, "window": call.window, "backend": call.backend}
    return function(*tensors, bias, call.dropout, **options)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_named_engine_runs(call, monkeypatch):
    ran = []

    def watched(name, function):
        return lambda *given, **options: ran.append(name) or function(*given, **options)

    runners = [
        ("sdpa", dispatch.delegate, "attention"),
        ("torch", ops, "Blockwise"),
        ("reference", dispatch.reference, "attention"),
    ]
    if importlib.util.find_spec("triton") is not None:
        from lowtide.ops.attention.triton_backend import launch_forward

        runners.append(("triton", launch_forward, "forward"))
    for name, owner, attribute in runners:
        monkeypatch.setattr(owner, attribute, watched(name, getattr(owner, attribute)))
    run(call)
    assert ran == [call.choice().backend]


def test_reasons():
    assert "lowtide takes every bias itself" in replace(SMALL, bias=(1, 1, 1, 12)).choice().reason
    assert "it takes no window" in replace(SMALL, window=(1, 0)).choice().reason
    for_cuda = AskedAttentionCall(device="cuda", K=512).choice()
    assert "at most 256 features" in for_cuda.reason
    assert ("not triton" in for_cuda.reason) == (for_cuda.backend == "torch")
    assert "query is float64" in AskedAttentionCall(device="cuda", dtype=torch.float64).choice().reason


def test_auto_takes_the_quicker_kernels(monkeypatch):
    """The Triton kernels run though torch's are right too. A backend that is named runs."""
    pytest.importorskip("triton")
    small = AskedAttentionCall(device="cuda", B=1024, H=8, M=64, K=64)
    narrow = AskedAttentionCall(device="cuda", B=16, H=16, M=1024, K=32)
    causal = replace(narrow, B=32, mask=Mask.CAUSAL)
    for call in (narrow, replace(narrow, K=8), replace(narrow, G=4), causal):
        assert "slow for at most 32 features" in call.choice().reason
    for call in (small, replace(small, M=32, N=128), replace(small, K=40, G=4, mask=Mask.CAUSAL)):
        assert "slow for many heads" in call.choice().reason
    others = [{"M": 65, "N": 64}, {"M": 31, "N": 64}, {"N": 129}, {"K": 72}, {"B": 1023}]
    for call in (
        *(replace(small, **each) for each in others),
        replace(narrow, K=40),
        replace(narrow, N=1023),
        replace(narrow, M=16, N=1 << 17),
        replace(causal, B=31),
        replace(causal, B=512, M=256),
    ):
        assert call.choice().backend == "sdpa"
    for call in (small, narrow):
        assert call.choice().backend == "triton"
        assert replace(call, backend="sdpa").choice().backend == "sdpa"
    monkeypatch.setattr(backend, "_is_measured", lambda device: False)
    for call in (small, narrow):
        assert call.choice().backend == "sdpa"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": (1, 3, 12, 12)}, "attn_bias must broadcast"),
        ({"backend": "sdpa", "dropout": 0.1}, "backend='sdpa' cannot run this call"),
        ({"backend": "fast"}, "backend must be one of"),
        ({"backend": "triton", "dtype": torch.float64}, "backend='triton' cannot run this call"),
        ({"G": 3}, "query's heads must be a multiple"),
        ({"softcap": -1.0}, "softcap must be"),
        ({"mask": Mask.BLOCKS, "B": 2}, "query must be a batch of one"),
        ({"layout": Layout.BMK}, "heads must be 1"),
    ],
)
def test_errors_of_the_call(changes, message):
    call = replace(SMALL, **changes)
    with pytest.raises(ValueError, match=message):
        call.choice()
    if "layout" not in changes:
        with pytest.raises(ValueError, match=message):
            run(call)


def test_table_in_docs():
    pytest.importorskip("triton")
    """The page asks for it when the site is built; tests/docs reads the result."""
    assert "<!-- {ways-of-attention} -->\n" in DOCS.read_text()
    assert [call for call, *_ in table()] == [*LINES]


def test_table_line_is_one_engine():
    """Or it would have to be two lines."""
    for call, cases in LINES.items():
        for device in ("cpu", "cuda"):
            found = {AskedAttentionCall(device=device, **case).choice().backend for case in cases}
            assert len(found) == 1, (call, device)
