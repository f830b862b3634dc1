import dataclasses
import importlib.util

import pytest
import torch

from lowtide.tools.bench.cases import AXES, CASES, LossCase, Mode, sweep
from lowtide.tools.bench.providers import PROVIDERS, Unavailable
from lowtide.tools.bench.truth import exact, relative_error

SMOKE = {case.device: case for case in CASES if case.smoke}
BY_NAME = {provider.name: provider for provider in PROVIDERS}
CUDA_ONLY = {"liger", "liger-fp32", "cut-cross-entropy", "quack", "quack-scaled-exp"}


def test_names_unique():
    assert len(BY_NAME) == len(PROVIDERS)
    assert len({case.name for case in CASES}) == len(CASES)


def test_sweeps_share_center():
    center = LossCase("center", 16384, 2048, 131072, torch.bfloat16, "cuda")
    cases = sweep(center, AXES)
    assert len(cases) == len({case.name for case in cases}) == 13
    assert [case.tokens for case in sweep(center, ["tokens"])] == [2048, 4096, 8192, 16384, 32768]
    for case in cases:
        away = [axis for axis in AXES if getattr(case, axis) != getattr(center, axis)]
        assert case is center if not away else len(away) == 1
        if away:
            assert case.name == f"center-{away[0]}-{getattr(case, away[0])}"
            assert getattr(case, away[0]) / getattr(center, away[0]) in (1 / 8, 1 / 4, 1 / 2, 2)


def test_shapes_measured():
    shapes = {case.name: (case.tokens, case.features, case.classes) for case in CASES}
    assert shapes["A"] == (16384, 2048, 131072)
    assert shapes["B"] == (16384, 4096, 128256)
    assert shapes["C"] == (8192, 2304, 256000)
    assert shapes["D"] == (32768, 4096, 128256)
    assert set(SMOKE) == {"cpu", "cuda"}


@pytest.mark.parametrize("name", sorted(CUDA_ONLY))
def test_peers_of_cuda_unavailable_on_cpu(name):
    with pytest.raises(Unavailable, match="CUDA"):
        BY_NAME[name].load(SMOKE["cpu"])


@pytest.mark.parametrize("name", sorted(CUDA_ONLY))
def test_peer_not_installed(name):
    module = {"liger": "liger_kernel", "cut": "cut_cross_entropy", "quack": "quack"}[name.split("-")[0]]
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(Unavailable, match=f"not installed: No module named '{module}'"):
        BY_NAME[name].load(SMOKE["cuda"])


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - CUDA_ONLY - {"compile"}))
def test_providers_on_cpu_match_truth(name):
    case = dataclasses.replace(SMOKE["cpu"], tokens=40, features=24, classes=56)
    input_ND, weight_VD, target_N = case.inputs(requires_grad=True)
    if name == "torch-chunked" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no chunked loss")
    loss = BY_NAME[name].load(case)(input_ND, weight_VD, target_N)
    got = (loss.detach(), *torch.autograd.grad(loss, (input_ND, weight_VD)))
    for one, want in zip(got, exact(input_ND, weight_VD, target_N, Mode.STEP), strict=True):
        assert relative_error(one, want) < 1e-6


def test_chunked_loss_of_an_older_torch(monkeypatch):
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(Unavailable, match=r"2\.13"):
        BY_NAME["torch-chunked"].load(SMOKE["cpu"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_weight_is_float32(dtype):
    case = dataclasses.replace(SMOKE["cpu"], dtype=dtype)
    if dtype == torch.float32:
        with pytest.raises(Unavailable, match="half precision"):
            BY_NAME["lowtide-1GiB-autocast"].call(case, case.inputs(requires_grad=True))
        return
    inputs = case.inputs(requires_grad=True)
    call = BY_NAME["lowtide-1GiB-autocast"].call(case, inputs)
    grad_input_ND, grad_weight_VD = torch.autograd.grad(call.run(), call.leaves)
    assert (grad_input_ND.dtype, grad_weight_VD.dtype) == (torch.bfloat16, torch.float32)
    plain = BY_NAME["lowtide-1GiB"].call(case, inputs)
    (loss,), (plain_loss,) = call.run(), plain.run()
    assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-6)
