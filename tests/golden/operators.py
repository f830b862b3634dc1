"""Make inputs of a row of the table, and a function of those that are differentiated, for each
operator but attention.

Shapes: N tokens, D features, V classes.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import losses
from lowtide.ops import distillation
from tests.golden import inside
from tests.golden.given import F32, Function, Given, Make

# The linear cross-entropy.


def loss(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype = F32,
    *,
    positions: tuple[int, ...] = (),
    bias: bool = False,
    class_weight: bool = False,
    learned_scale: bool = False,
    probabilities: torch.dtype | None = None,
    tracked_target: bool = False,
    rank: int = 0,
    module: bool = False,
    transposed: bool = False,
    **options: Any,
) -> Make:
    """rank: features of a second linear term; transposed: classes of weight lie side by side."""

    def make(given: Given) -> Function:
        given.leaf("input", N, D, dtype=dtype)
        weight = given.weight("linear_weight", V, *positions, D, dtype=dtype)
        if transposed:
            given.track("linear_weight", weight.detach().t().contiguous().t())
        if rank:
            given.leaf("second input", N, rank, dtype=dtype)
            given.weight("second weight", V, rank, dtype=dtype)
        if bias:
            given.leaf("linear_bias", V, *positions, dtype=dtype)
        if learned_scale:
            given.track("logit_scale", torch.tensor(0.8, dtype=dtype, device=given.device))
        plain = dict(options)
        if class_weight:
            plain["weight"] = given.numbers(V).abs().add(0.5).to(dtype)
        if probabilities is None:
            target = given.classes(V, N, *positions, ignore_index=options.get("ignore_index"))
        else:
            target = given.numbers(N, V, *positions, scale=3.0).softmax(1).to(probabilities)
            if tracked_target:
                given.track("target", target)
        criterion = lowtide.LinearCrossEntropyLoss(D, V, bias=bias, **options) if module else None

        def function(*leaves: Tensor) -> Tensor:
            named = dict(zip(given.leaves, leaves))
            if criterion is not None:
                parameters = {"linear.weight": named["linear_weight"], "linear.bias": named["linear_bias"]}
                return torch.func.functional_call(criterion, parameters, (named["input"], target))
            own = plain | {name: named[name] for name in ("linear_bias", "logit_scale") if name in named}
            terms = [named["input"]], [named["linear_weight"]]
            if rank:
                terms[0].append(named["second input"])
                terms[1].append(named["second weight"])
                return inside.loss_of_terms(*terms, target, **own)
            return lowtide.linear_cross_entropy(terms[0][0], terms[1][0], named.get("target", target), **own)

        return function

    return make


def log_probs(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype = F32,
    *,
    bias: bool = False,
    learned_scale: bool = False,
    **options: Any,
) -> Make:
    def make(given: Given) -> Function:
        given.leaf("input", N, D, dtype=dtype)
        given.weight("linear_weight", V, D, dtype=dtype)
        if bias:
            given.leaf("linear_bias", V, dtype=dtype)
        if learned_scale:
            given.track("logit_scale", torch.tensor(0.8, dtype=dtype, device=given.device))
        target = given.classes(V, N)

        def function(input: Tensor, weight: Tensor, *others: Tensor) -> Any:
            own = dict(zip(list(given.leaves)[2:], others))
            return lowtide.linear_log_probs(input, weight, target, **own, **options)

        return function

    return make


# The chunked loss, and deferred logits.


def chunked(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype = F32,
    *,
    per_row: bool = False,
    has_aux: bool = False,
    tracked_rows: bool = False,
    **options: Any,
) -> Make:
    """tracked_rows: a factor of each row, which gets a gradient."""

    def make(given: Given) -> Function:
        given.leaf("hidden", N, D, dtype=dtype)
        given.weight("weight", V, D, dtype=dtype)
        given.leaf("bias", V, dtype=dtype)
        if tracked_rows:
            given.leaf("factor", N)
        labels = given.classes(V, N)

        def loss_fn(logits: Tensor, labels: Tensor, factor: Tensor | None = None) -> Any:
            wide = logits.to(torch.promote_types(logits.dtype, F32))
            reduction = "none" if per_row or factor is not None else "sum"
            found = F.cross_entropy(wide, labels, reduction=reduction)
            found = found if factor is None else found * factor
            found = found if per_row else found.sum()
            return (found, {"right": (wide.argmax(1) == labels).sum()}) if has_aux else found

        def function(hidden: Tensor, weight: Tensor, bias: Tensor, *factor: Tensor) -> Any:
            head = functools.partial(F.linear, weight=weight, bias=bias)
            return lowtide.chunked_loss(loss_fn, head, hidden, labels, *factor, has_aux=has_aux, **options)

        return function

    return make


class Adapted(nn.Linear):
    """A head with a low-rank adapter of its own."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.down, self.up = (
            nn.Linear(self.in_features, 8, bias=False),
            nn.Linear(8, self.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 2.0 * self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, head: type[nn.Linear], D: int, V: int, softcap: float | None) -> None:
        super().__init__()
        self.trunk, self.lm_head, self.softcap = nn.Linear(D, D), head(D, V), softcap

    def forward(self, x: Tensor) -> Tensor:
        logits = self.lm_head(torch.tanh(self.trunk(x)))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def deferred(
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype = F32,
    *,
    head: type[nn.Linear] = nn.Linear,
    softcap: float | None = None,
    gathered: bool = False,
    **options: Any,
) -> Make:
    """gathered: the log-probabilities of the targets, by log_softmax and gather; else
    F.cross_entropy. The function is of the model's own parameters, whatever it is given."""

    def make(given: Given) -> Function:
        model = Model(head, D, V, softcap).to(given.device, dtype)
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.copy_(given.numbers(*parameter.shape, scale=1.5 / D**0.5))
            given.leaves[name] = parameter
        hidden, target = given.numbers(N, D, dtype=dtype), given.classes(V, N)

        def function(*leaves: Tensor) -> Tensor:
            with lowtide.defer_logits(model, head=model.lm_head) as deferral:
                logits = model(hidden)
                if gathered:
                    of_rows = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[:, None])
                    found = -of_rows.mean()
                else:
                    found = F.cross_entropy(logits, target, **options)
            if deferral.materialized:
                raise RuntimeError(f"real logits were made: {deferral.materialized}")
            return found

        return function

    return make


# Distillation, and the other losses.


def distill(
    divergence: str,
    N: int,
    D: int,
    V: int,
    dtype: torch.dtype = F32,
    *,
    bias: bool = False,
    ignored: bool = False,
    **options: Any,
) -> Make:
    divergence_of = getattr(distillation, divergence)

    def make(given: Given) -> Function:
        given.leaf("student_input", N, D, dtype=dtype)
        given.weight("student_weight", V, D, dtype=dtype)
        if bias:
            given.leaf("student_bias", V, dtype=dtype)
        teacher = given.numbers(N, 2 * D, dtype=dtype), given.numbers(V, 2 * D, dtype=dtype, scale=0.2)
        own = options | ({"ignored": ~given.bools(N)} if ignored else {})

        def function(input: Tensor, weight: Tensor, *student_bias: Tensor) -> Tensor:
            biases = dict(zip(["student_bias"], student_bias))
            return divergence_of(input, weight, *teacher, **biases, **own)

        return function

    return make


def contrastive_losses(B: int, D: int) -> Make:
    def make(given: Given) -> Function:
        given.leaf("image", B, D)
        given.leaf("text", B, D)
        given.track("logit_scale", torch.tensor(0.3, device=given.device))

        def function(image: Tensor, text: Tensor, scale: Tensor) -> Any:
            return {
                "info_nce": losses.info_nce(image, torch.cat([text, image]), logit_scale=scale),
                "contrastive": losses.contrastive(image, text, logit_scale=scale),
            }

        return function

    return make


def losses_of_hidden_states(B: int, T: int, D: int, V: int) -> Make:
    """The z-loss, and what needs a policy's log-probabilities."""

    def make(given: Given) -> Function:
        given.leaf("input", B, T, D)
        given.weight("linear_weight", V, D)
        target, reference_B = given.classes(V, B, T), given.numbers(B, scale=5.0)
        reference_BT, advantages = given.numbers(B, T).sub(4), given.numbers(B)
        label = given.bools(B)

        def function(input: Tensor, weight: Tensor) -> Any:
            chosen, rejected = losses.sequence_log_probs(input, weight, target).chunk(2)
            means = losses.sequence_log_probs(input, weight, target, reduction="mean")
            references, tokens = reference_B.chunk(2), lowtide.linear_log_probs(input, weight, target)
            policy = torch.cat([chosen, rejected])
            return {
                "z_loss": losses.z_loss(input, weight, target),
                "dpo": losses.dpo(chosen, rejected, *references, label_smoothing=0.1),
                "simpo": losses.simpo(*means.chunk(2)),
                "orpo": losses.orpo(*means.chunk(2)),
                "kto": losses.kto(policy, reference_B, label, 0.3),
                "grpo": losses.grpo(
                    tokens.log_prob, reference_BT, advantages, target != -100, reference=reference_BT
                ),
            }

        return function

    return make
