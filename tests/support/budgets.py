"""The truth: the whole logits and torch's own losses, in any dtype; and how large an error may be.

Float64 is exact enough to be called so. "Eager" is the same in the dtype under test, with logits
and all after them in float32. A magnitude is the exact result with every term of its sums taken by
absolute value.

Shapes: N tokens, D features, V classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.half_products import WideLinear, multiplies_halves

HALVES = (torch.bfloat16, torch.float16)
Result = dict[str, Tensor]


@dataclass(frozen=True)
class Inputs:
    input: Tensor  # [..., D]
    linear_weight: Tensor  # [V, D]
    target: Tensor  # [...], or class probabilities [..., V]
    linear_bias: Tensor | None = None  # [V]
    weight: Tensor | None = None  # [V]
    logit_scale: Tensor | None = None  # 0-d
    row_weight: Tensor | None = None  # [...]

    def leaves(self) -> dict[str, Tensor]:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: t for name, t in tensors.items() if t is not None and t.requires_grad}

    def to(self, dtype: torch.dtype) -> "Inputs":
        """New leaves with the same values; class indices are left as they are."""
        changed = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None and tensor.is_floating_point():
                changed[field.name] = tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
        return replace(self, **changed)

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.input.dtype, torch.float32)

    @property
    def leading(self) -> torch.Size:
        return self.input.shape[:-1]

    @property
    def x_ND(self) -> Tensor:
        return self.input.reshape(self.leading.numel(), self.input.shape[-1])

    @property
    def probabilities(self) -> bool:
        return self.target.is_floating_point()

    def row_weight_N(self, ignore_index: int | None) -> Tensor:
        """1 where none are given, 0 where the row is ignored."""
        weight = self.input.new_ones(self.leading) if self.row_weight is None else self.row_weight
        return weight.detach().reshape(-1).masked_fill(self.ignored_N(ignore_index), 0)

    def ignored_N(self, ignore_index: int | None) -> Tensor:
        if self.probabilities:
            return self.target.new_zeros(self.leading.numel(), dtype=torch.bool)
        return self.target.reshape(-1).long() == (-100 if ignore_index is None else ignore_index)


def dense(
    inputs: Inputs,
    *,
    reduction: str = "mean",
    normalizer: float | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    workspace: int | None = None,
    backend: str | None = None,
) -> Tensor:
    reduction = reduction if normalizer is None else "sum"
    logits_NV = dense_logits(inputs, softcap=softcap, logit_scale=logit_scale)
    N, V = logits_NV.shape
    target = inputs.target
    by_row = bool(z_loss) or inputs.row_weight is not None
    loss = F.cross_entropy(
        logits_NV,
        target.reshape(N, V).to(logits_NV.dtype) if inputs.probabilities else target.reshape(-1).long(),
        weight=None if inputs.weight is None else inputs.weight.to(logits_NV.dtype),
        reduction="none" if by_row else reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )
    if z_loss:
        ignored_N = inputs.ignored_N(ignore_index)
        loss = loss + (z_loss * logits_NV.logsumexp(1).square()).masked_fill(ignored_N, 0)
    if inputs.row_weight is not None:
        # Masked once more: the gradient of a mean over nothing is infinite.
        loss = loss * inputs.row_weight_N(ignore_index).to(loss.dtype)
        loss = loss.masked_fill(inputs.ignored_N(ignore_index), 0)
    if by_row:
        if reduction == "mean":
            loss = loss.sum() / row_weights(inputs, ignore_index).to(loss.dtype).sum()
        elif reduction == "sum":
            loss = loss.sum()
    loss = loss if normalizer is None else loss / normalizer
    return loss.view(inputs.leading) if reduction == "none" else loss


def dense_log_probs(
    inputs: Inputs,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float | None = None,
    workspace: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log_prob, entropy, logsumexp and argmax of each row; of ignored ones 0, 0, 0 and -1."""
    logits_NV = dense_logits(inputs, softcap=softcap, logit_scale=logit_scale)
    ignored_N = inputs.ignored_N(ignore_index)
    target_N = inputs.target.reshape(-1).long().masked_fill(ignored_N, 0)
    log_prob_NV = logits_NV.log_softmax(1)
    # A class of probability 0 adds nothing.
    entropy_N = -(log_prob_NV.exp() * log_prob_NV.clamp(min=torch.finfo(log_prob_NV.dtype).min)).sum(1)
    results = (log_prob_NV.gather(1, target_N[:, None])[:, 0], entropy_N, logits_NV.logsumexp(1))
    argmax_N = logits_NV.detach().argmax(1).masked_fill(ignored_N, -1)
    log_prob, entropy, logsumexp = (
        result.masked_fill(ignored_N, 0).view(inputs.leading) for result in results
    )
    return log_prob, entropy, logsumexp, argmax_N.view(inputs.leading)


def dense_logits(
    inputs: Inputs, *, softcap: float | None = None, logit_scale: float | None = None
) -> Tensor:  # [N, V]
    dtype, x_ND = inputs.sum_dtype, inputs.x_ND
    if inputs.input.dtype in HALVES and (inputs.input.is_cuda or multiplies_halves()):
        logits_NV = WideLinear.apply(x_ND, inputs.linear_weight, inputs.linear_bias)
    else:
        bias_V = None if inputs.linear_bias is None else inputs.linear_bias.to(dtype)
        logits_NV = F.linear(x_ND.to(dtype), inputs.linear_weight.to(dtype), bias_V)
    if inputs.logit_scale is not None:
        logits_NV = inputs.logit_scale.to(dtype) * logits_NV
    elif logit_scale is not None:
        logits_NV = logit_scale * logits_NV
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)


def differentiate(
    loss_of: Callable[..., Tensor], inputs: Inputs, upstream: Tensor | float = 1.0, **options: Any
) -> Result:
    loss, leaves = loss_of(inputs, **options), inputs.leaves()
    seed = torch.as_tensor(upstream, dtype=loss.dtype, device=loss.device).expand_as(loss)
    return {
        "loss": loss.detach(),
        **dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values()), seed))),
    }


def differentiate_log_probs(
    log_probs_of: Callable[..., Sequence[Tensor]],
    inputs: Inputs,
    upstream: Sequence[Tensor | None],
    **options: Any,
) -> Result:
    """`upstream` of log_prob, entropy and logsumexp; None for a result that nothing is made of."""
    found = log_probs_of(inputs, **options)
    used = [(out, seed.to(out.dtype)) for out, seed in zip(found, upstream) if seed is not None]
    leaves = inputs.leaves()
    gradients = torch.autograd.grad(
        [out for out, _ in used], list(leaves.values()), [seed for _, seed in used]
    )
    names = ("log_prob", "entropy", "logsumexp", "argmax")
    return {**{name: out.detach() for name, out in zip(names, found)}, **dict(zip(leaves, gradients))}


# The budget.


def budget(eager: Tensor, exact: Tensor, magnitude: Tensor, *, factor: float, dtype: torch.dtype) -> float:
    """How far from `exact` a result may be: `factor` times eager torch's error, and a rounding.

    `dtype` is that of the sums. Two float64 results cannot tell which of them is off. There `eager`
    is float32's, scaled by the ratio of the two roundings; and `exact` has an error of its own.
    """
    eager_error = norm(eager.double().detach() - exact)
    rounding = torch.finfo(dtype).eps * norm(magnitude)
    if dtype == torch.float64:
        eager_error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return (factor + 1) * eager_error + 2 * rounding
    return factor * eager_error + rounding


def norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


def row_weights(inputs: Inputs, ignore_index: int | None) -> Tensor:
    """[N]: what a mean counts a row as; 0 where it is ignored."""
    ignored_N = inputs.ignored_N(ignore_index)
    if inputs.probabilities or inputs.weight is None:
        return (~ignored_N).to(inputs.sum_dtype)
    target_N = inputs.target.reshape(-1).long().masked_fill(ignored_N, 0)
    return inputs.weight.detach().to(inputs.sum_dtype)[target_N].masked_fill(ignored_N, 0)


def row_shares(
    inputs: Inputs,
    *,
    reduction: str = "mean",
    normalizer: float | None = None,
    ignore_index: int | None = None,
    **_: Any,
) -> Tensor:
    """[N]: what a row's own loss is multiplied by in the result; 0 where it is ignored."""
    share_N = (~inputs.ignored_N(ignore_index)).to(inputs.sum_dtype)
    if normalizer is not None:
        return share_N / normalizer
    return share_N / row_weights(inputs, ignore_index).sum() if reduction == "mean" else share_N


@torch.no_grad()
def magnitudes(
    inputs: Inputs,
    upstream: Tensor | float = 1.0,
    *,
    reduction: str = "mean",
    normalizer: float | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **options: Any,
) -> Result:
    """Of the loss and its gradients; 0 where not finite."""
    z_NV = dense_logits(inputs, **_chain(options))
    V = z_NV.shape[1]
    y_NV = (1 - label_smoothing) * _target_NV(inputs, ignore_index, V) + label_smoothing / V
    class_weight_V = z_NV.new_ones(V) if inputs.weight is None else inputs.weight
    pull_NV = y_NV * class_weight_V
    share_N = row_shares(inputs, reduction=reduction, normalizer=normalizer, ignore_index=ignore_index)
    share_N = share_N * inputs.row_weight_N(ignore_index).to(share_N.dtype).abs()
    upstream_N = torch.as_tensor(upstream, dtype=z_NV.dtype, device=z_NV.device).abs()
    factor_N1 = (share_N * upstream_N.expand(inputs.leading).reshape(-1))[:, None]

    logsumexp_N = z_NV.logsumexp(1).abs()
    gap_NV = (logsumexp_N[:, None] + z_NV.abs()).nan_to_num(0, 0)
    loss_N = ((pull_NV * gap_NV).sum(1) + z_loss * logsumexp_N**2) * share_N
    push_N = pull_NV.sum(1) + 2 * z_loss * logsumexp_N
    grad_NV = (z_NV.softmax(1) * push_N[:, None] + pull_NV) * factor_N1
    return {
        "loss": loss_N.view(inputs.leading) if reduction == "none" else loss_N.sum(),
        "target": (gap_NV * class_weight_V * factor_N1).view(*inputs.leading, V),
        "weight": (gap_NV * y_NV * factor_N1).sum(0),
        **_of_the_head(inputs, grad_NV, **_chain(options)),
    }


@torch.no_grad()
def log_prob_magnitudes(
    inputs: Inputs, upstream: Sequence[Tensor | None], *, ignore_index: int = -100, **options: Any
) -> Result:
    z_NV = dense_logits(inputs, **_chain(options))
    p_NV = z_NV.softmax(1)
    y_NV = _target_NV(inputs, ignore_index, z_NV.shape[1])
    logsumexp_N = z_NV.amax(1).abs() + (z_NV - z_NV.amax(1, keepdim=True)).exp().sum(1).log()
    gap_NV = (logsumexp_N[:, None] + z_NV.abs()).nan_to_num(0, 0)
    # The terms of an entropy are differences from the largest logit: none need cancel another.
    entropy_gap_NV = (z_NV.amax(1, keepdim=True) - z_NV).nan_to_num(0, 0)
    entropy_gap_NV += (z_NV - z_NV.amax(1, keepdim=True)).exp().sum(1, keepdim=True).log()
    entropy_N = (p_NV * entropy_gap_NV).sum(1)
    counted_N = ~inputs.ignored_N(ignore_index)
    # Gradients of log_prob, entropy, logsumexp.
    own = (p_NV + y_NV, p_NV * (entropy_gap_NV + entropy_N[:, None]), p_NV)
    grad_NV = torch.zeros_like(z_NV)
    for derivative_NV, seed in zip(own, upstream):
        if seed is not None:
            grad_NV += derivative_NV * (seed.reshape(-1).abs() * counted_N)[:, None]
    rows = {"log_prob": (gap_NV * y_NV).sum(1), "entropy": entropy_N, "logsumexp": logsumexp_N}
    return {
        **{name: (row_N * counted_N).view(inputs.leading) for name, row_N in rows.items()},
        **_of_the_head(inputs, grad_NV, **_chain(options)),
    }


def _chain(options: dict[str, Any]) -> dict[str, Any]:
    """What comes between the product and the loss."""
    return {name: options[name] for name in ("softcap", "logit_scale") if name in options}


def _target_NV(inputs: Inputs, ignore_index: int | None, V: int) -> Tensor:
    if inputs.probabilities:
        return inputs.target.detach().reshape(inputs.leading.numel(), V).to(inputs.sum_dtype).abs()
    target_N = inputs.target.reshape(-1).long().masked_fill(inputs.ignored_N(ignore_index), 0)
    return F.one_hot(target_N, V).to(inputs.sum_dtype)


def _of_the_head(
    inputs: Inputs, grad_NV: Tensor, *, softcap: float | None = None, logit_scale: float | None = None
) -> Result:
    """What a gradient of logits becomes, none of its terms cancelling another."""
    x_ND = inputs.x_ND
    products_NV = dense_logits(replace(inputs, logit_scale=None))
    scale = inputs.logit_scale if inputs.logit_scale is not None else logit_scale
    scale = torch.as_tensor(1.0 if scale is None else scale, dtype=grad_NV.dtype, device=grad_NV.device)
    if softcap is not None:
        # The slope is 1 - tanh^2.
        grad_NV = grad_NV * (1 + torch.tanh(scale * products_NV / softcap) ** 2)
    grad_NV = grad_NV.nan_to_num(0, 0)
    scaled_NV = grad_NV * scale.abs()
    return {
        "input": (scaled_NV @ inputs.linear_weight.abs()).view(inputs.input.shape),
        "linear_weight": scaled_NV.t() @ x_ND.abs(),
        "linear_bias": scaled_NV.sum(0),
        "logit_scale": (grad_NV * products_NV.abs()).nan_to_num(0, 0).sum(),
    }
