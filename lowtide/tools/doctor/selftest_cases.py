"""List the fifty calls of the self-test, each with its definition in plain torch.

Shapes: N tokens, D features, V classes; B sequences, M queries and keys, H heads, K features of a
head.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import attn_bias, distillation, losses
from lowtide.tools.eager import eager_attention, eager_divergence

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensor]
N, D, V = 256, 64, 2048
CHUNKS = 512 << 10  # a workspace with room for few of the tokens at a time
B, M, H, K = 2, 160, 4, 32


class Case(NamedTuple):
    """Describe a call: `ours` and `plain` compute the same of tensors of one dtype."""

    name: str
    dtype: torch.dtype
    tensors: Callable[[], Tensors]
    ours: Function
    plain: Function


# The arguments of the loss that a case's tensors are, beside the head and the target.
ARGUMENTS = {
    "bias": "linear_bias",
    "class_weight": "weight",
    "row_weight": "row_weight",
    "scale": "logit_scale",
}
CONSTANTS = ("target", "class_weight", "row_weight", "teacher", "teacher_weight")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _head() -> Tensors:
    target = torch.randint(V, (N,))
    target[::7] = -100
    return {"input": torch.randn(N, D), "weight": torch.randn(V, D) / 8, "target": target}


def _head_and(**more: Callable[[], Tensor]) -> Callable[[], Tensors]:
    return lambda: _head() | {name: make() for name, make in more.items()}


def _logits(given: Tensors) -> Tensor:
    return _wide(given["input"]) @ _wide(given["weight"]).t()


def _loss(given: Tensors, **options: Any) -> Tensor:
    tensors = {argument: given[name] for name, argument in ARGUMENTS.items() if name in given}
    return lowtide.linear_cross_entropy(
        given["input"], given["weight"], given["target"], **tensors, **options
    )


def _plain_loss(given: Tensors, softcap: float | None = None, z_loss: float = 0.0, **options: Any) -> Tensor:
    logits_NV, target, class_weight_V = _logits(given), given["target"], given.get("class_weight")
    if "scale" in given:
        logits_NV = _wide(given["scale"]) * logits_NV
    if "bias" in given:
        logits_NV = logits_NV + _wide(given["bias"])
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    if target.is_floating_point():
        target = _wide(target)
    if class_weight_V is not None:
        class_weight_V = _wide(class_weight_V)
    counted = target != -100
    if "row_weight" in given:
        losses_N = F.cross_entropy(logits_NV, target, reduction="none")
        return (losses_N * _wide(given["row_weight"])).sum() / counted.sum()
    loss = F.cross_entropy(logits_NV, target, class_weight_V, **options)
    if z_loss:
        loss = loss + z_loss * (logits_NV.logsumexp(-1).square() * counted).sum() / counted.sum()
    return loss


# Each option of the loss: its name, the arguments that are numbers, and the tensors it needs.
OPTIONS: tuple[tuple[str, dict[str, Any], dict[str, Callable[[], Tensor]]], ...] = (
    ("bias", {}, {"bias": lambda: torch.randn(V)}),
    ("class weights", {}, {"class_weight": lambda: torch.rand(V)}),
    ("label smoothing", {"label_smoothing": 0.1}, {}),
    ("soft cap", {"softcap": 3.0}, {}),
    ("learned scale", {}, {"scale": lambda: torch.tensor(0.75)}),
    ("z-loss", {"z_loss": 1e-3}, {}),
    ("row weights", {}, {"row_weight": lambda: torch.rand(N)}),
    ("class probabilities", {}, {"target": lambda: torch.randn(N, V).softmax(-1)}),
)


def _log_probs(given: Tensors) -> Tensor:
    found = lowtide.linear_log_probs(given["input"], given["weight"], given["target"])
    return found.log_prob + 0.1 * found.entropy


def _plain_log_probs(given: Tensors) -> Tensor:
    target_N, log_p_NV = given["target"], _logits(given).log_softmax(-1)
    entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
    log_prob_N = log_p_NV.gather(1, target_N.clamp(min=0)[:, None])[:, 0]
    return torch.where(target_N == -100, torch.zeros_like(entropy_N), log_prob_N + 0.1 * entropy_N)


def _sum(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="sum")


def _model(given: Tensors) -> nn.Linear:
    head = nn.Linear(D, V, bias=False, device="meta")
    head.weight = given["weight"]  # type: ignore[assignment]
    return head


def _chunked(given: Tensors) -> Tensor:
    return lowtide.chunked_loss(_sum, _model(given), given["input"], given["target"], chunk_size=100) / N


def _deferred(given: Tensors) -> Tensor:
    head = _model(given)
    with lowtide.defer_logits(head, head=head):
        return F.cross_entropy(head(given["input"]), given["target"])


def _teachers() -> Tensors:
    return {
        "input": torch.randn(N, D),
        "weight": torch.randn(V, D) / 8,
        "teacher": torch.randn(N, D),
        "teacher_weight": torch.randn(V, D) / 8,
    }


def _distilled(function: Callable[..., Tensor]) -> Function:
    return lambda given: function(*(given[name] for name in ("input", "weight", "teacher", "teacher_weight")))


def _pairs() -> Tensors:
    return {"input": torch.randn(N, D), "keys": torch.randn(N, D)}


def _info_nce(given: Tensors) -> Tensor:
    return losses.info_nce(given["input"], given["keys"], logit_scale=0.1)


def _plain_info_nce(given: Tensors) -> Tensor:
    scores_NN = _wide(given["input"]) @ _wide(given["keys"]).t()
    return F.cross_entropy(0.1 * scores_NN, torch.arange(N, device=scores_NN.device))


def _qkv(B: int = B, key_heads: int = H, **more: Callable[[], Tensor]) -> Callable[[], Tensors]:
    def make() -> Tensors:
        key, value = (torch.randn(B, M, key_heads, K) for _ in range(2))
        return {"query": torch.randn(B, M, H, K), "key": key, "value": value} | {
            name: tensor() for name, tensor in more.items()
        }

    return make


def _attention(mask: Callable[[], attn_bias.AttentionBias] | None = None, **options: Any) -> Function:
    def ours(given: Tensors) -> Tensor:
        query, key, value = (given[name] for name in ("query", "key", "value"))
        bias = given.get("bias") if mask is None else mask()
        return lowtide.memory_efficient_attention(query, key, value, bias, **options)

    return ours


def _plain_attention(
    sees: Callable[[Tensor, Tensor], Tensor] | None = None, softcap: float | None = None
) -> Function:
    def plain(given: Tensors) -> Tensor:
        query, key, value = (_wide(given[name]) for name in ("query", "key", "value"))
        bias = _wide(given["bias"]) if "bias" in given else None
        places = torch.arange(M, device=query.device)
        hidden = None if sees is None else ~sees(places[:, None], places[None, :])
        return eager_attention(query, key, value, bias, None, hidden, softcap)

    return plain


F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
LENGTHS = (60, 100)  # Lengths of two sequences, which lie in one row of M tokens.


def _same_sequence(i: Tensor, j: Tensor) -> Tensor:
    return ((i >= LENGTHS[0]) == (j >= LENGTHS[0])) & (j <= i)


def _packed() -> attn_bias.AttentionBias:
    return attn_bias.BlockDiagonalCausalMask.from_seqlens(LENGTHS)


def _cases() -> Iterator[Case]:
    def both(name: str, tensors: Callable[[], Tensors], ours: Function, plain: Function) -> Iterator[Case]:
        for dtype in (F32, BF16):
            yield Case(name, dtype, tensors, ours, plain)

    for dtype in (F64, F32, BF16, F16):
        for reduction, workspace in (("mean", None), ("sum", CHUNKS), ("none", None)):
            in_chunks = f", in {CHUNKS >> 10} KiB" if workspace else ""
            ours = partial(_loss, reduction=reduction, workspace=workspace)
            plain = partial(_plain_loss, reduction=reduction)
            yield Case(f"loss, {reduction}{in_chunks}", dtype, _head, ours, plain)
    for name, numbers, tensors in OPTIONS:
        ours, plain = partial(_loss, **numbers), partial(_plain_loss, **numbers)
        yield from both(f"loss, {name}", _head_and(**tensors), ours, plain)
    yield from both("log-probabilities and entropy", _head, _log_probs, _plain_log_probs)
    for dtype in (F64, F32):
        yield Case(
            "chunked loss", dtype, _head, _chunked, lambda given: _sum(_logits(given), given["target"]) / N
        )
    yield Case("deferred logits", F32, _head, _deferred, _plain_loss)
    for name, beta, function in (
        ("forward KL", 0, distillation.forward_kl),
        ("reverse KL", 1, distillation.reverse_kl),
        ("Jensen-Shannon", 0.5, distillation.jensen_shannon),
    ):
        eager = _distilled(partial(eager_divergence, beta=beta))
        yield Case(name, F32, _teachers, _distilled(function), eager)
    yield Case("InfoNCE", F32, _pairs, _info_nce, _plain_info_nce)
    for dtype in (F64, F32, BF16, F16):
        yield Case("attention", dtype, _qkv(), _attention(), _plain_attention())
    yield from both(
        "attention, causal",
        _qkv(),
        _attention(attn_bias.LowerTriangularMask),
        _plain_attention(lambda i, j: j <= i),
    )
    yield from both(
        "attention, bias with a gradient",
        _qkv(bias=lambda: torch.randn(1, H, M, M)),
        _attention(),
        _plain_attention(),
    )
    yield from both(
        "attention, packed sequences", _qkv(B=1), _attention(_packed), _plain_attention(_same_sequence)
    )
    yield Case("attention, grouped keys", BF16, _qkv(key_heads=2), _attention(), _plain_attention())
    yield Case("attention, soft cap", F32, _qkv(), _attention(softcap=2.0), _plain_attention(softcap=2.0))
    yield Case(
        "attention, window",
        F32,
        _qkv(),
        _attention(window=(16, 0)),
        _plain_attention(lambda i, j: (j <= i) & (j >= i - 16)),
    )


CASES = tuple(_cases())
