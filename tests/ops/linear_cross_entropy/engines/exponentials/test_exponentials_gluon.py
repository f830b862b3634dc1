"""On a Hopper card the exponentials of the Gluon pipeline have the bits of those of Triton."""

import pytest
import torch

from tests.conftest import NEEDS_CUDA

pytest.importorskip("triton")

from lowtide.core.kernels import backend
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm import launch
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import LogitTransform

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]

SIZES = ((1, 8, 8), (130, 264, 72), (333, 1000, 200), (1024, 4104, 512))  # C, B, D
OPTIONS = {
    "plain": {},
    "bias and scale": {"bias_V": 1, "scale": 1},
    "gradient": {"factor_C": 1},
    "gradient of entropy": {"softmax_coef_C": 1, "entropy_coef_C": 1},
}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(backend, "FEWEST", 1)
    if not backend.pipelines_on(torch.device("cuda")):
        pytest.skip("needs a Hopper card and a Triton that the pipeline knows")


def made(C, B, D, options, *, second=False, out=True, first_class=0):
    generator = torch.Generator("cuda").manual_seed(C + B + D)

    def random(*size, dtype=torch.float32):
        return torch.randn(size, device="cuda", generator=generator).to(dtype)

    terms = [(random(C, D, dtype=torch.bfloat16), random(B, D, dtype=torch.bfloat16).mul_(D**-0.5))]
    if second:
        terms.append((random(C, 16, dtype=torch.bfloat16), random(B, 16, dtype=torch.bfloat16)))
    sizes = {"bias_V": (B,), "scale": ()}
    given = {name: random(*sizes.get(name, (C,))) for name in options}
    transform = LogitTransform(*(given.pop(name, None) for name in sizes))
    reference_C, target_C = random(C), torch.randint(B, (C,), device="cuda", generator=generator)
    reference_C[::7] = torch.inf
    out_CB = None
    if out:
        out_CB = torch.empty(C, -(-B // 8) * 8 + 8, device="cuda", dtype=torch.bfloat16)[:, :B]
    target_C += first_class
    return launch.Exponentials(
        *terms,
        reference_C=reference_C,
        target_C=target_C,
        out_CB=out_CB,
        first_class=first_class,
        transform=transform,
        **given,
    )


def stored(tiles, **partials):
    found = {name: tiles.partials(dtype).fill_(-7) for name, dtype in partials.items()}
    if tiles.exp_CB is None:
        tiles.run(**found)
        return list(found.values())
    whole_CS = tiles.exp_CB._base.fill_(torch.nan)
    tiles.run(**found)
    assert not tiles.exp_CB.isnan().any()
    assert whole_CS[:, tiles.B :].isnan().all()  # beyond the last class
    return [*found.values(), tiles.exp_CB]


def check_both(monkeypatch, tiles, **partials):
    mine, again = stored(tiles, **partials), stored(tiles, **partials)
    monkeypatch.setattr(backend, "pipelines_on", lambda device: False)
    for each, second, want in zip(mine, again, stored(tiles, **partials)):
        assert torch.equal(each, second)
        assert torch.equal(each, want)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_same_bits(monkeypatch, size, name):
    check_both(monkeypatch, made(*size, OPTIONS[name]), sums=torch.float32)


@pytest.mark.parametrize("size", SIZES)
def test_same_bits_two_terms(monkeypatch, size):
    check_both(monkeypatch, made(*size, {}, second=True), sums=torch.float32, grad_dot_logits=torch.float32)


@pytest.mark.parametrize("size", SIZES)
def test_next_block_adds(monkeypatch, size):
    """It adds to -7 here, and stores what the first block would."""
    partials = dict.fromkeys(("sums", "grad_dot_logits"), torch.float32)
    *found, exp_CB = stored(made(*size, {}), **partials)
    another = made(*size, {}, first_class=384)
    *more, exp_too_CB = stored(another, **partials)
    assert torch.equal(exp_CB, exp_too_CB)
    for each_TC, more_TC in zip(found, more):
        assert torch.equal(each_TC - 7, more_TC)
    check_both(monkeypatch, another, **partials)


@pytest.mark.parametrize("size", SIZES)
def test_same_bits_log_probs(monkeypatch, size):
    partials = dict.fromkeys(("sums", "means", "maxima"), torch.float32)
    check_both(monkeypatch, made(*size, {}, out=False), **partials, places=torch.int32)
