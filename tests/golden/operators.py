"""How a row of the table becomes inputs, and a function of those that are differentiated.

Shapes: N tokens, D features, V classes; of attention B batches, M queries, N keys, H query heads, G
key heads, K features of queries and keys, E of values.
"""

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide import attn_bias, losses
from lowtide.ops import distillation
from tests.golden import inside

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

Outputs = dict[str, Tensor]
Function = Callable[..., Any]
"""Of the differentiated tensors, in their order: a tensor, or a tuple or dict with numbers."""


class Given:
    """Inputs of one call: drawn on the CPU by a generator that its name seeds, then moved."""

    def __init__(self, name: str, device: str) -> None:
        self.device, self.generator = device, torch.Generator().manual_seed(zlib.crc32(name.encode()))
        self.leaves: dict[str, Tensor] = {}

    def numbers(self, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator).mul_(scale)
        return drawn.to(dtype).to(self.device)

    def leaf(self, name: str, *shape: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
        return self.track(name, self.numbers(*shape, dtype=dtype, scale=scale))

    def track(self, name: str, tensor: Tensor) -> Tensor:
        self.leaves[name] = tensor.requires_grad_()
        return tensor

    def weight(self, name: str, V: int, *rest: int, dtype: torch.dtype = F32) -> Tensor:
        return self.leaf(name, V, *rest, dtype=dtype, scale=2 / rest[-1] ** 0.5)

    def classes(self, V: int, *shape: int, ignore_index: int | None = None) -> Tensor:
        target = torch.randint(V, shape, generator=self.generator)
        ignored = torch.rand(shape, generator=self.generator) < 0.2
        return target.masked_fill_(ignored, -100 if ignore_index is None else ignore_index).to(self.device)

    def bools(self, *shape: int, rate: float = 0.7) -> Tensor:
        return (torch.rand(shape, generator=self.generator) < rate).to(self.device)


Make = Callable[[Given], Function]


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


# Attention.


def attention(
    B: int,
    M: int,
    H: int,
    K: int,
    dtype: torch.dtype = F32,
    *,
    N: int | None = None,
    G: int | None = None,
    E: int | None = None,
    mask: attn_bias.AttentionBias | None = None,
    bias: tuple[int, ...] | None = None,
    visible: tuple[int, ...] | None = None,
    logsumexp: bool = False,
    **options: Any,
) -> Make:
    """bias: the shape of one that is trained; visible: that of a bool mask."""
    N, G, E = N or M, G or H, E or K
    function_of = (
        lowtide.memory_efficient_attention_with_lse if logsumexp else lowtide.memory_efficient_attention
    )

    def make(given: Given) -> Function:
        for name, shape in {"query": (B, M, H, K), "key": (B, N, G, K), "value": (B, N, G, E)}.items():
            given.leaf(name, *shape, dtype=dtype)
        if bias is not None:
            given.leaf("bias", *bias, dtype=dtype)
        seen = None if visible is None else given.bools(*visible)

        def function(query: Tensor, key: Tensor, value: Tensor, trained: Tensor | None = None) -> Any:
            of_scores = mask if trained is None else trained if mask is None else mask.add_bias(trained)
            return function_of(query, key, value, of_scores if seen is None else seen, **options)

        return function

    return make


def torchs_attention(
    leading: tuple[int, ...],
    M: int,
    H: int,
    K: int,
    dtype: torch.dtype = F32,
    *,
    N: int | None = None,
    G: int | None = None,
    attn_mask: tuple[int, ...] | None = None,
    visible: tuple[int, ...] | None = None,
    **options: Any,
) -> Make:
    """scaled_dot_product_attention; attn_mask: shape of a trained one; visible: of a bool one."""
    N, G = N or M, G or H

    def make(given: Given) -> Function:
        given.leaf("query", *leading, H, M, K, dtype=dtype)
        given.leaf("key", *leading, G, N, K, dtype=dtype)
        given.leaf("value", *leading, G, N, K, dtype=dtype)
        if attn_mask is not None:
            given.leaf("attn_mask", *attn_mask, dtype=dtype)
        seen = None if visible is None else given.bools(*visible)

        def function(query: Tensor, key: Tensor, value: Tensor, trained: Tensor | None = None) -> Tensor:
            return lowtide.scaled_dot_product_attention(
                query, key, value, trained if seen is None else seen, **options
            )

        return function

    return make


def merged_attention(B: int, M: int, H: int, K: int) -> Make:
    def make(given: Given) -> Function:
        for name in ("query", "key", "value"):
            given.leaf(name, B, M, H, K)

        def function(query: Tensor, key: Tensor, value: Tensor) -> Any:
            parts = [
                lowtide.memory_efficient_attention_with_lse(query, key[:, keys], value[:, keys])
                for keys in (slice(0, M // 3), slice(M // 3, M))
            ]
            return lowtide.merge_attentions(parts)

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


# Derivatives.


def named_outputs(found: Any) -> Outputs:
    """The tensors of a result, by name."""
    if isinstance(found, Tensor):
        return {"out": found}
    if hasattr(found, "_asdict"):
        found = found._asdict()
    pairs = found.items() if isinstance(found, dict) else enumerate(found)
    return {
        f"{name}.{inner}".removesuffix(".out"): tensor
        for name, each in pairs
        for inner, tensor in named_outputs(each).items()
    }


def upstream(out: Tensor) -> Tensor:
    """A gradient of `out` that is no power of two, and differs from number to number."""
    if out.dim() == 0:
        return torch.full_like(out, -0.7)
    return torch.linspace(-1, 1.3, out.numel(), device=out.device).view(out.shape).to(out.dtype)


def _differentiable(outputs: Outputs) -> list[Tensor]:
    return [out for out in outputs.values() if out.requires_grad]


def _gradients_of(results: Sequence[Tensor], leaves: dict[str, Tensor], **options: Any) -> Outputs:
    found = torch.autograd.grad(
        results, list(leaves.values()), [upstream(each) for each in results], allow_unused=True, **options
    )
    return {f"grad {name}": each for name, each in zip(leaves, found) if each is not None}


def values(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    with torch.no_grad():
        return named_outputs(function(*leaves.values()))


def gradients(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    outputs = named_outputs(function(*leaves.values()))
    return outputs | _gradients_of(_differentiable(outputs), leaves)


def gradients_twice(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    """Two backward passes of one graph, the second of another upstream gradient."""
    (out,) = _differentiable(named_outputs(function(*leaves.values())))
    first = _gradients_of([out], leaves, retain_graph=True)
    return first | {f"again {name}": each for name, each in _gradients_of([3 * out], leaves).items()}


def double_backward(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    outputs = named_outputs(function(*leaves.values()))
    first = _gradients_of(_differentiable(outputs), leaves, create_graph=True)
    second = _gradients_of([each for each in first.values() if each.requires_grad], leaves)
    return outputs | first | {f"second {name}": each for name, each in second.items()}


def jvp(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    primals = tuple(each.detach() for each in leaves.values())
    out, tangent = torch.func.jvp(function, primals, tuple(map(upstream, primals)))
    return {"out": out, "tangent": tangent}


def vmap_of_grad(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    first, *others = (each.detach() for each in leaves.values())

    def weighted(*own: Tensor) -> Tensor:
        out = function(*own)
        return (out * upstream(out)).sum()

    of_one = torch.func.grad(weighted, argnums=tuple(range(len(leaves))))
    found = torch.func.vmap(of_one, in_dims=(0, *(None for _ in others)))(
        torch.stack([first, 0.5 * first]), *others
    )
    return {f"grads {name}": each for name, each in zip(leaves, found)}


def hessian(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    primals = tuple(each.detach() for each in leaves.values())
    return {"hessian": torch.func.hessian(function)(*primals)}


def compiled(function: Function, leaves: dict[str, Tensor]) -> Outputs:
    return gradients(torch.compile(function, backend="aot_eager", fullgraph=True), leaves)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Torch's own attention kernels on CUDA give the same bits only so."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
