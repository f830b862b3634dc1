"""Logits so far apart that float32 has no digits after the point: the largest has probability 1.

A kernel that forms a logit by a multiplication must give its maximum and its exponential the same
bits. A fused multiply-add, which Triton's interpreter does not have, made exp(z - max) 0 or
infinite there.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.ops.linear_cross_entropy.on_exponentials import dtype_on, put_everywhere
from tests.support.loss import check, differentiate, fused, make_inputs, planned, skip_unless_runnable

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of Triton's interpreter

softmax_triton = pytest.importorskip("lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton")

HUGE = 1e30
TRANSFORMS = {
    "scale": {"logit_scale": HUGE},
    "soft cap": {"logit_scale": HUGE, "softcap": HUGE},  # logits are 1e30 tanh(u)
}


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_one_class_has_all(device, transform, probabilities, smoothing, backend):
    skip_unless_runnable(backend, device)
    inputs = make_inputs(7, 5, 11, device=device, ignored=0.2, probabilities=probabilities)
    options = TRANSFORMS[transform] | {"label_smoothing": smoothing}
    check(differentiate(fused, inputs, backend=backend, **options), inputs, **options)


@pytest.mark.parametrize("engine", ["exponentials", "soft_targets"])
def test_on_hopper(device, engine, monkeypatch):
    put_everywhere(device, monkeypatch)
    probabilities = engine == "soft_targets"
    inputs = make_inputs(37, 24, 112, device=device, dtype=dtype_on(device), probabilities=probabilities)
    assert getattr(planned(inputs, None, backend="triton"), engine)
    options = TRANSFORMS["scale"]
    check(differentiate(fused, inputs, backend="triton", **options), inputs, **options)


def test_on_hopper_with_a_huge_soft_cap(device, monkeypatch):
    """It is for the other engine: exponentials have no registers to round such logits first."""
    put_everywhere(device, monkeypatch)
    inputs = make_inputs(37, 24, 112, device=device, dtype=dtype_on(device))
    assert planned(inputs, None, backend="triton", softcap=2.0**24).exponentials
    assert not planned(inputs, None, backend="triton", softcap=HUGE).exponentials
    options = TRANSFORMS["soft cap"]
    check(differentiate(fused, inputs, backend="triton", **options), inputs, **options)


@pytest.mark.parametrize("transform", [None, *TRANSFORMS])
def test_reads_of_capped_logits_are_not_fused(device, transform, monkeypatch):
    skip_unless_runnable("triton", device)
    inputs, kernel, fuses = make_inputs(7, 5, 11, device=device), softmax_triton._softmax_gradient_kernel, []

    class Recorder:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                fuses.append(options["enable_fp_fusion"])
                return kernel[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(softmax_triton, "_softmax_gradient_kernel", Recorder())
    fused(inputs, backend="triton", **TRANSFORMS.get(transform, {})).backward()
    assert fuses
    assert set(fuses) == {transform != "soft cap"}


@pytest.fixture(scope="module")
def assembly():
    """The PTX of distances_from_maximum.py, by transform and whether the slope is computed, too."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.linear_cross_entropy.engines.distances_from_maximum"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {tuple(key): ptx for key, ptx in map(json.loads, run.stdout.splitlines())}


@pytest.mark.extended
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_no_sum_takes_a_product(assembly, transform):
    """ptxas fuses such a sum, unless one is marked rn: z has the same bits in all kernels."""
    plain, sloped = (operations_of(assembly[transform, slope]) for slope in (False, True))
    assert sorted(plain) == sorted(sloped)
    assert any(name in ("sub.f32", "sub.rn.f32") for name, _ in plain)  # z - max is one
    for name, operands in plain:
        assert name not in ("add.f32", "sub.f32") or not {"mul.f32", "div.full.f32"} & set(operands)


def operations_of(ptx):
    """All that makes z - max, which is stored first: the names of operations and operands'."""
    lines = re.findall(r"^\s*([a-z]\S*)\s+(?:\{ )?(%r\d+)(?: \})?, (.*);", ptx, re.MULTILINE)
    made = {
        register: (name, re.findall(r"%r\d+", rest)) for name, register, rest in lines if name[:3] != "mov"
    }

    def named(register):
        name, operands = made.get(register, ("", []))
        return named(operands[0]) if name in ("neg.f32", "abs.f32") else name

    waiting, met = [re.search(r"st\.global\S* \[.*\], \{ (%r\d+) \}", ptx)[1]], set()
    for register in waiting:
        waiting += [each for each in made.get(register, ("", []))[1] if each not in met]
        met |= set(waiting)
    return [
        (made[each][0], tuple(map(named, made[each][1]))) for each in dict.fromkeys(waiting) if each in made
    ]
