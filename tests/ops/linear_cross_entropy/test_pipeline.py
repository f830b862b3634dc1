"""On a Hopper card the pipeline leaves what Triton's kernels leave, which the interpreter runs elsewhere."""

import pytest
import torch

from tests.conftest import NEEDS_CUDA

pytest.importorskip("triton")

from lowtide.core import backend
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm import Exponentials

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]

SIZES = ((1, 8, 8), (130, 264, 72), (333, 1000, 200), (1024, 4104, 512))  # C, B, D
OPTIONS = {
    "plain": {},
    "bias and scale": {"bias_B": 1, "scale": 1},
    "gradient": {"factor_C": 1},
    "gradient of entropy": {"pull_C": 1, "tilt_C": 1},
}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(backend, "FEWEST", 1)
    if not backend.pipelines_on(torch.device("cuda")):
        pytest.skip("needs a Hopper card and a Triton that the pipeline knows")


def made(C, B, D, options, *, second=False, stored=True, first_class=0):
    generator = torch.Generator("cuda").manual_seed(C + B + D)

    def random(*size, dtype=torch.float32):
        return torch.randn(size, device="cuda", generator=generator).to(dtype)

    terms = [(random(C, D, dtype=torch.bfloat16), random(B, D, dtype=torch.bfloat16).mul_(D**-0.5))]
    if second:
        terms.append((random(C, 16, dtype=torch.bfloat16), random(B, 16, dtype=torch.bfloat16)))
    sizes = {"bias_B": (B,), "scale": (), "factor_C": (C,), "pull_C": (C,), "tilt_C": (C,)}
    given = {name: random(*sizes[name]) if name in sizes else value for name, value in options.items()}
    reference_C, target_C = random(C), torch.randint(B, (C,), device="cuda", generator=generator)
    reference_C[::7] = torch.inf
    out_CB = None
    if stored:
        out_CB = torch.empty(C, -(-B // 8) * 8 + 8, device="cuda", dtype=torch.bfloat16)[:, :B]
    target_C += first_class
    return Exponentials(
        *terms,
        reference_C=reference_C,
        target_C=target_C,
        out_CB=out_CB,
        first_class=first_class,
        **given,
    )


def left(tiles, **partials):
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
    mine, again = left(tiles, **partials), left(tiles, **partials)
    monkeypatch.setattr(backend, "pipelines_on", lambda device: False)
    for each, second, want in zip(mine, again, left(tiles, **partials)):
        assert torch.equal(each, second)
        assert torch.equal(each, want)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPTIONS)
def test_exponentials(monkeypatch, size, name):
    check_both(monkeypatch, made(*size, OPTIONS[name]), sums=torch.float32)


@pytest.mark.parametrize("size", SIZES)
def test_of_two_terms(monkeypatch, size):
    check_both(monkeypatch, made(*size, {}, second=True), sums=torch.float32, moments=torch.float32)


@pytest.mark.parametrize("size", SIZES)
def test_another_block_of_classes_adds_to_what_is_there(monkeypatch, size):
    """-7, that is; and else it leaves what the first would."""
    partials = dict.fromkeys(("sums", "moments"), torch.float32)
    *found, exp_CB = left(made(*size, {}), **partials)
    another = made(*size, {}, first_class=384)
    *more, exp_too_CB = left(another, **partials)
    assert torch.equal(exp_CB, exp_too_CB)
    for each_TC, more_TC in zip(found, more):
        assert torch.equal(each_TC - 7, more_TC)
    check_both(monkeypatch, another, **partials)


@pytest.mark.parametrize("size", SIZES)
def test_statistics_of_log_probabilities(monkeypatch, size):
    partials = dict.fromkeys(("sums", "means", "maxima"), torch.float32)
    check_both(monkeypatch, made(*size, {}, stored=False), **partials, places=torch.int32)
