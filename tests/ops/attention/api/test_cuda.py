"""What holds on a card alone: who runs a call there, and that nothing waits for the device."""

import pytest
import torch

import lowtide
from lowtide import attn_bias as masks
from lowtide.ops.attention.operator import ops
from tests.ops.attention.helpers import assert_equal, check, differentiate, make_case, make_upstream, ours
from tests.support.cuda_graphs import captured
from tests.support.loss import no_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = {
    "plain": {},
    "causal, bias of keys": {"mask": masks.LowerTriangularMask(), "bias": (1, 0, 0, 1)},
    "bias of rows": {"bias": (0, 1, 1, 1), "softcap": 4.0},
    "dropout": {"p": 0.3, "seed": 3, "window": (20, 3)},
    "sequences": {"B": 1, "mask": masks.BlockDiagonalCausalMask.from_seqlens([30, 34])},
    "more features than most": {"K": 600, "E": 520},
}


def case_of(name, **more):
    sizes = {"B": 2, "M": 64, "N": 64, "H": 4, "G": 2, "K": 32, "device": "cuda"}
    return make_case(**(sizes | CASES[name] | more))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, "triton"), (torch.float64, "torch")])
@pytest.mark.parametrize("name", CASES)
def test_backend_chosen(name, dtype, expected, monkeypatch):
    from lowtide.ops.attention.triton_backend import launch_backward, launch_forward

    ran = set()
    for engine, module, attribute in (
        ("triton", launch_forward, "forward"),
        ("triton", launch_backward, "backward"),
        ("torch", ops, "Blockwise"),
        ("torch", ops, "BlockwiseBackward"),
    ):
        run = getattr(module, attribute)
        monkeypatch.setattr(
            module, attribute, lambda *given, run=run, engine=engine: ran.add(engine) or run(*given)
        )
    case = case_of(name, dtype=dtype)
    upstream = make_upstream(case)
    check(differentiate(ours, case, upstream), case, upstream)
    assert ran == {expected}


@pytest.mark.parametrize("name", CASES)
def test_no_device_sync(name):
    case = case_of(name)
    upstream = make_upstream(case)
    expected = differentiate(ours, case, upstream)
    with no_synchronisation("cuda"):
        found = differentiate(ours, case, upstream)
    assert_equal(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_cuda_graph(name):
    """Captured once, forward and backward, and played for other data in the same memory."""
    case = case_of(name, dtype=torch.bfloat16)
    upstream = make_upstream(case)
    leaves = case.leaves()

    def step():
        return differentiate(ours, case, upstream)

    graph, found = captured(step)
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    expected = step()
    assert_equal(found, expected)


@pytest.mark.parametrize("name", CASES)
def test_deterministic_algorithms(name):
    case = case_of(name)
    upstream = make_upstream(case)
    expected = differentiate(ours, case, upstream)
    torch.use_deterministic_algorithms(True)
    try:
        found = differentiate(ours, case, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", CASES)
def test_tensors_not_on_current_device(name):
    case = case_of(name, device="cuda:1")
    assert torch.cuda.current_device() == 0
    upstream = make_upstream(case)
    check(differentiate(ours, case, upstream), case, upstream)
    out = lowtide.memory_efficient_attention(case.query, case.key, case.value, p=0.1)
    assert out.device == case.query.device
