"""normalizer, what a mean divides by in place of its count: on every engine."""

import pytest
import torch

from lowtide.core.bfloat16_units import gemm
from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from lowtide.ops.linear_cross_entropy.planning import requirements
from tests.ops.linear_cross_entropy.on_exponentials import dtype_on, put_everywhere
from tests.ops.linear_cross_entropy.options.helpers import ALL, WARNINGS, made_of
from tests.ops.linear_cross_entropy.options.normalizer.helpers import COUNT
from tests.ops.linear_cross_entropy.options.test_options import DTYPES, KINDS
from tests.ops.linear_cross_entropy.options.test_several_terms import in_terms
from tests.support.loss import (
    HALVES,
    check,
    differentiate,
    fused,
    make_inputs,
    planned,
    skip_unless_runnable,
    smallest_workspace,
)

pytestmark = WARNINGS


def check_normalized(inputs, loss_of=fused, **options):
    options = options | {"normalizer": COUNT}
    check(differentiate(loss_of, inputs, -0.7, **options), inputs, upstream=-0.7, **options)


@pytest.mark.parametrize("workspace", ["default", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_with_each_option(device, kind, dtype, workspace):
    inputs, options = made_of(device=device, dtype=dtype, kind=kind)
    for backend in ("auto", "torch") if device == "cuda" else ("torch",):
        chosen, bytes = options | {"backend": backend}, None
        if workspace == "few":
            bytes = 2 * smallest_workspace(lambda size, own=chosen: fused(inputs, workspace=size, **own))
        check_normalized(inputs, workspace=bytes, **chosen)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("kind", ["plain", *ALL])
def test_triton(device, kind, dtype):
    skip_unless_runnable("triton", device)
    inputs, options = made_of(5, 3, 21, device=device, dtype=dtype, kind=kind, ignored=0.4)
    check_normalized(inputs, backend="triton", **options)


@pytest.mark.parametrize("kind", ["exponentials", "soft_targets"])
def test_on_hopper(device, kind, monkeypatch):
    pytest.importorskip("triton")
    put_everywhere(device, monkeypatch)
    inputs = make_inputs(
        37, 24, 112, device=device, dtype=dtype_on(device), bias=True, probabilities=kind == "soft_targets"
    )
    assert getattr(planned(inputs, None, backend="triton"), kind)
    check_normalized(inputs, backend="triton")


def test_cpu_exponentials(monkeypatch):
    if not gemm.available():
        pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
    monkeypatch.setattr(requirements, "FEWEST_WEIGHTS", 0)
    inputs = make_inputs(370, 160, 503, dtype=torch.bfloat16, bias=True, class_weight=True)
    assert planned(inputs, None, z_loss=0.01).cpu_exponentials
    check_normalized(inputs, z_loss=0.01)


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_reference(device, kind):
    inputs, options = made_of(device=device, dtype=torch.float64, kind=kind)
    check_normalized(inputs, backend="reference", **options)


def test_several_terms(device):
    inputs, options = made_of(device=device, kind="all, classes")
    check_normalized(inputs, loss_of=in_terms(cross_entropy, (8, 11)), **options)


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(device, dtype):
    """A normaliser of the input's dtype is not rounded to autocast's."""
    inputs, _ = made_of(device=device, dtype=dtype, bias=True)
    count = torch.tensor(257.0, device=device)  # bfloat16 has no such number
    with torch.autocast(device, dtype):
        found = differentiate(fused, inputs.to(torch.float32), normalizer=count)
    expected = differentiate(fused, inputs.to(torch.float32), reduction="sum")
    with torch.autocast(device, dtype):
        expected = differentiate(fused, inputs.to(torch.float32), 1 / 257, reduction="sum")
    torch.testing.assert_close(found["loss"], expected["loss"] / 257, rtol=1e-6, atol=0)
    assert found["input"].dtype == torch.float32
