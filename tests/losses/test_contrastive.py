"""contrastive and info_nce against the softmax over all similarities."""

import pytest
import torch
import torch.nn.functional as F

from lowtide.losses import contrastive, info_nce
from tests.losses import DTYPES, check_against_eager, check_gradients, leaves_in

B, K, D = 7, 11, 5


def pairs():
    image_BD, text_BD = (F.normalize(torch.randn(B, D), dim=-1) for _ in range(2))
    return {"image": image_BD, "text": text_BD, "logit_scale": torch.tensor(14.0)}, {}


def queries():
    """Four keys more than queries, and scores that differ much."""
    leaves = {"query": torch.randn(B, D), "key": torch.randn(K, D), "logit_scale": torch.tensor(3.0)}
    return leaves, {}


def scores(rows, columns, scale):
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return scale.to(dtype) * rows.to(dtype) @ columns.to(dtype).t()


def dense_contrastive(leaves, _):
    s_BB = scores(leaves["image"], leaves["text"], leaves["logit_scale"])
    texts, images = s_BB.log_softmax(1).diagonal(), s_BB.log_softmax(0).diagonal()
    return -(texts.mean() + images.mean()) / 2


def dense_info_nce(leaves, _):
    return -scores(leaves["query"], leaves["key"], leaves["logit_scale"]).log_softmax(1).diagonal().mean()


def fused_contrastive(leaves, _):
    return contrastive(leaves["image"], leaves["text"], logit_scale=leaves["logit_scale"])


def fused_info_nce(leaves, _):
    return info_nce(leaves["query"], leaves["key"], logit_scale=leaves["logit_scale"])


CASES = [
    pytest.param(fused_contrastive, dense_contrastive, pairs, id="contrastive"),
    pytest.param(fused_info_nce, dense_info_nce, queries, id="info_nce"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("fused", "dense", "make"), CASES)
@pytest.mark.usefixtures("on_device")
def test_accuracy_within_eager(fused, dense, make, dtype):
    check_against_eager(fused, dense, make, dtype)


@pytest.mark.parametrize(("fused", "dense", "make"), CASES)
def test_gradcheck(fused, dense, make):
    check_gradients(fused, make)


def test_one_pair_loss_zero():
    leaves = leaves_in({name: t[:1] if t.dim() else t for name, t in pairs()[0].items()}, torch.float32)
    loss = fused_contrastive(leaves, {})
    loss.backward()
    assert loss.item() == 0
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, torch.zeros_like(leaf)), name


def test_equal_embeddings_uniform():
    same_BD = torch.ones(B, D)
    torch.testing.assert_close(contrastive(same_BD, same_BD, logit_scale=3.0), torch.tensor(B).log())


def test_scale_learned_as_logarithm():
    """CLIP's parameter: its gradient is that of the scale, times the scale."""
    leaves = leaves_in(pairs()[0], torch.float64)
    logarithm = leaves["logit_scale"].detach().log().requires_grad_()
    (of_logarithm,) = torch.autograd.grad(
        contrastive(leaves["image"], leaves["text"], logit_scale=logarithm.exp()), logarithm
    )
    (of_scale,) = torch.autograd.grad(dense_contrastive(leaves, {}), leaves["logit_scale"])
    torch.testing.assert_close(of_logarithm, of_scale * leaves["logit_scale"])


def test_scale_float_and_no_reduction():
    leaves = queries()[0]
    got_B = info_nce(leaves["query"], leaves["key"], logit_scale=3.0, reduction="none")
    want_BK = scores(leaves["query"], leaves["key"], leaves["logit_scale"])
    torch.testing.assert_close(got_B, want_BK.logsumexp(1) - want_BK.diagonal())


def test_more_negatives_higher_loss():
    query_BD, key_KD = queries()[0]["query"], queries()[0]["key"]
    few = info_nce(query_BD, key_KD[:B], logit_scale=1.0)
    assert info_nce(query_BD, key_KD, logit_scale=1.0) > few


def test_errors_name_dtypes_of_caller():
    float32, bfloat16 = torch.ones(3, 4), torch.ones(3, 4).bfloat16()
    for call, message in (
        (contrastive, r"text must have the dtype of image \(torch.float32\), got torch.bfloat16; cast"),
        (info_nce, r"key must have the dtype of query \(torch.float32\), got torch.bfloat16; cast"),
    ):
        with pytest.raises(TypeError, match=message):
            call(float32, bfloat16, logit_scale=1.0)
        with torch.autocast("cpu", torch.bfloat16):
            assert call(float32, bfloat16, logit_scale=1.0).isfinite()
    with pytest.raises(TypeError, match=r"text must be a torch\.Tensor, got list"):
        contrastive(float32, [1.0], logit_scale=1.0)
    with pytest.raises(ValueError, match=r"text must be on image's device \(cpu\), got meta"):
        contrastive(float32, float32.to("meta"), logit_scale=1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: contrastive(torch.ones(3, 4), torch.ones(5, 4), logit_scale=1.0),
            r"text .*\[3, 4\].*\[5, 4\]",
        ),
        (lambda: info_nce(torch.ones(3, 4), torch.ones(2, 4), logit_scale=1.0), r"key .*K >= 3.*\[2, 4\]"),
        (lambda: info_nce(torch.ones(3, 4), torch.ones(3, 5), logit_scale=1.0), r"key .*\[K, 4\].*\[3, 5\]"),
        (
            lambda: contrastive(torch.ones(3, 1, 4), torch.ones(3, 1, 4), logit_scale=1.0),
            r"image must have shape \[B, D\], got \[3, 1, 4\]",
        ),
        (lambda: info_nce(torch.ones(3, 1, 4), torch.ones(3, 4), logit_scale=1.0), r"query .*\[3, 1, 4\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
