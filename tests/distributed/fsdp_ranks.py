"""Computes, as processes of test_fsdp.py, two steps' gradients of a model under FSDP2, beside those
of one process that has all of the data. The result: the largest error of a gradient over the
largest gradient, and the collectives of the head in the second step.

A scenario is (loss, arrangement, options): the loss is computed by a function given the head's
parameter, by chunked_loss given the head, or by the model's own code with deferred logits.

Shapes: B sequences, T tokens, D features, V classes, R rank of an adapter.
"""

import contextlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial

import lowtide
from lowtide.distillation import forward_kl
from tests.support.collectives import Collectives
from tests.support.ranks import RANKS, generator, largest_errors, mesh_of

B, T, D, V, R = 2, 5, 8, 37, 3


class Adapted(nn.Module):
    """A frozen head and a trained adapter, as PEFT has them."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(D, R, bias=False), nn.Linear(R, V, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, hidden):
        return self.base(hidden) + 2 * self.up(self.down(hidden))


def summed(logits, targets):
    return F.cross_entropy(
        logits.float() if logits.dtype == torch.bfloat16 else logits, targets, reduction="sum"
    )


def by_parameter(model, hidden, targets, normalizer):
    return lowtide.linear_cross_entropy(
        hidden, model.head.weight, targets, linear_bias=model.head.bias, normalizer=normalizer
    )


def by_log_probs(model, hidden, targets, normalizer):
    out = lowtide.linear_log_probs(hidden, model.head.weight, targets, linear_bias=model.head.bias)
    return -out.log_prob.sum() / normalizer


def by_masked_rows(model, hidden, targets, normalizer):
    """Masks losses in place, as training loops do: the hooks of FSDP2 on the result must stay."""
    rows = lowtide.linear_cross_entropy(hidden, model.head.weight, targets, reduction="none")
    rows *= targets != -100
    return rows.sum() / normalizer


def by_masked_logits(model, hidden, targets, normalizer):
    rows = F.cross_entropy(model.head(hidden).transpose(1, 2), targets, reduction="none")
    rows *= targets != -100
    return rows.sum() / normalizer


def by_chunks(model, hidden, targets, normalizer):
    return lowtide.chunked_loss(summed, model.head, hidden, targets, chunk_size=4, normalizer=normalizer)


def by_logits(model, hidden, targets, normalizer):
    return summed(model.head(hidden).flatten(0, 1), targets.flatten()) / normalizer


def by_divergence(model, hidden, targets, normalizer):
    """From a teacher that is sure of each target: it is the cross-entropy."""
    sure = 1e3 * F.one_hot(targets, V).float()
    weight = model.head.weight
    return forward_kl(hidden, weight, sure, torch.eye(V), reduction="sum") / normalizer


def by_shifted_logits(model, hidden, targets, normalizer):
    """A scale, then a shift: no head that the operators take."""
    logits = model.head(hidden) * 1.5 + torch.linspace(0, 1, V)
    return summed(logits.flatten(0, 1), targets.flatten()) / normalizer


def by_module(model, hidden, targets, normalizer):
    return model.criterion(hidden, targets, normalizer=normalizer)


def by_full_tensor(model, hidden, targets, normalizer, **placed):
    """Does what must not be done: TRL's pattern, whose gradient nobody reduces."""
    weight = model.head.weight
    weight = weight.full_tensor(**placed) if isinstance(weight, DTensor) else weight
    return summed((hidden @ weight.T).flatten(0, 1), targets.flatten()) / normalizer


def by_fused_full_tensor(model, hidden, targets, normalizer):
    return lowtide.linear_cross_entropy(
        hidden, model.head.weight.full_tensor(), targets, normalizer=normalizer
    )


def compiled(loss_of):
    return torch.compile(loss_of, backend="aot_eager")


LOSSES = {
    "parameter": by_parameter,
    "log-probs": by_log_probs,
    "chunked": by_chunks,
    "deferred": by_logits,
    "deferred by chunks": by_shifted_logits,
    "deferred rows": by_masked_logits,
    "masked rows": by_masked_rows,
    "eager": by_logits,
    "module": by_module,
    "full_tensor": by_full_tensor,
    "partial full_tensor": partial(by_full_tensor, grad_placements=(Partial(),)),
    "fused full_tensor": by_fused_full_tensor,
    "compiled parameter": compiled(by_parameter),
    "compiled log-probs": compiled(by_log_probs),
    "compiled divergence": compiled(by_divergence),
}


class Model(nn.Module):
    def __init__(self, loss_of, *, tied, adapted, outside, bias):
        super().__init__()
        width = D if tied else 2  # so that collectives as large as the head's are the head's
        self.embed, self.body, self.norm = nn.Embedding(V, width), nn.Linear(width, D), nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        if adapted:
            self.head = Adapted(self.head)
        if loss_of is by_module:
            self.criterion = lowtide.LinearCrossEntropyLoss(D, V, bias=bias)
            self.criterion.linear = self.head
        self.loss_of, self.outside = loss_of, outside

    def forward(self, tokens, targets, normalizer):
        hidden = self.norm(self.body(self.embed(tokens)).tanh())
        return hidden if self.outside else self.loss_of(self, hidden, targets, normalizer)


def build(kind, options):
    torch.manual_seed(0)
    return Model(
        LOSSES[kind],
        tied="tied" in options,
        adapted="adapted" in options,
        outside="outside" in options,
        bias="bias" in options,
    )


def sharded(model, options):
    given = {"mesh": mesh_of(RANKS)}
    if "mixed" in options:
        given["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "reshard" in options or "kept" in options:
        given["reshard_after_forward"] = "reshard" in options
    fully_shard(model.body, **given)
    if "tied" in options:
        if "root" not in options:
            fully_shard([model.embed, model.norm, model.head], **given)
    elif "with norm" in options:
        fully_shard([model.norm, model.head], **given)
    elif "own" in options:
        fully_shard(model.head, **given)
    return fully_shard(model, **given)


def step(model, tokens, targets, normalizer):
    result = model(tokens, targets, normalizer)
    loss = model.loss_of(model, result, targets, normalizer) if model.outside else result
    loss.backward()
    return loss.detach()


class Small(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, V, bias=bias)

    def forward(self, inputs):
        return self.norm(self.body(inputs).tanh())


def small(where, **given):
    model = Small(bias=given.pop("bias", False))
    given["mesh"] = mesh_of(RANKS)
    if where != "root":
        fully_shard([model.norm, model.head] if where == "with norm" else model.head, **given)
    return fully_shard(model, **given)


def run_gathered(case, loss_of, where, rank):
    """The error of the head's gradient, where its unit is gathered at the last loss."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, RANKS, 1, T, D), torch.randint(V, (2, RANKS, 1, T))
    model, whole = small(where), Small()

    def loss(of, k, each, function):
        hidden = of(inputs[k, each])
        return function(of, hidden.detach() if "frozen" in case else hidden, targets[k, each], T)

    if "evaluated" in case:
        with torch.no_grad():
            loss(model, 1, rank, loss_of)
    losses = [loss(model, k, rank, loss_of) for k in range(2 if "apart" in case else 1)]
    for each in losses:
        each.backward()
    for k in range(len(losses)):
        (sum(loss(whole, k, each, by_logits) for each in range(RANKS)) / RANKS).backward()
    model.reshard()
    model.head.reshard() if where != "root" else None
    found, expected = model.head.weight.grad, whole.head.weight.grad
    assert found is not None
    return {"error": ((found.full_tensor() - expected).abs().max() / expected.abs().max()).item()}


def run_stale(case, loss_of, where, rank):
    """The head's loss before and after its weights change behind an evaluation."""
    torch.manual_seed(1)
    hidden, targets = torch.randn(1, T, D), torch.randint(V, (1, T))
    model, whole = small(where), Small()
    own = model.head.weight  # the parameter that an optimizer holds
    model(hidden)
    with torch.no_grad():
        before = loss_of(model, hidden, targets, T)
        own.mul_(3)
        whole.head.weight.mul_(3)
    found, expected = (f(m, hidden, targets, T) for f, m in ((loss_of, model), (by_logits, whole)))
    return {"error": abs(found - expected).item(), "moved": abs(before - expected).item()}


def run_rounded(case, loss_of, where, rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    model = small(where, mp_policy=policy)
    return {"dtype": str(loss_of(model, model(torch.randn(T, D)), torch.randint(V, (T,)), T).dtype)}


def run_refused(case, what, where, rank):
    model = small(where, bias="bias" in what)
    weight, given = model.head.weight, {}
    hidden, targets = torch.randn(T, D), torch.randint(V, (T,))
    if what == "full_tensor":
        weight = weight.full_tensor().contiguous() * 1
    elif what == "bias copy":
        given = {"linear_bias": model.head.bias * 1}
    elif what == "bias":
        given = {"linear_bias": model.head.bias.full_tensor()}
    elif what == "shard_head":
        divided = Small()
        lowtide.shard_head(divided, mesh_of(RANKS), head=divided.head)
        weight = divided.head.weight.full_tensor()
    elif what == "tokens_sharded":
        given = {"tokens_sharded": True}
    else:
        weight = weight.detach()
    return {"loss": lowtide.linear_cross_entropy(hidden, weight, targets, **given).item()}


CASES = {"stale": run_stale, "rounded": run_rounded}


def run(kind, rank):
    case, *given = kind.split(", ")
    if case == "refused":
        return run_refused(case, *given, rank)
    if case in ("evaluated frozen", "frozen", "apart", "apart frozen", *CASES):
        loss, where = given
        return CASES.get(case, run_gathered)(case, LOSSES[loss], where, rank)
    loss_kind, *options = kind.split(", ")
    steps = 3 if "accumulated" in options else 1
    tokens, targets = torch.randint(V, (2, 2, steps, RANKS, B, T), generator=generator(1))
    targets[:, :, 0, 0] = -100  # ranks count differently
    if "mixed" in options:
        targets[:, :, 0, :, 1:] = -100
    own = loss_kind in ("module", "deferred by chunks")
    inner, whole = build(loss_kind, options), build(loss_kind if own else "eager", options)
    model = sharded(inner, options)
    deferral = lowtide.defer_logits(model, head=inner.head) if "deferred" in loss_kind else None
    collectives = Collectives(V * D)
    for turn in range(2):  # gradients accumulate over both, collectives are those of the second
        collectives.counts = dict.fromkeys(collectives.counts, 0)
        normalizer = lowtide.tokens_per_rank(list(targets[turn, :, rank]))
        with collectives if turn else contextlib.nullcontext():
            for k in range(steps):
                if steps > 1:
                    model.set_requires_gradient_sync(k == steps - 1)
                    if "no reshard" in options:
                        model.set_reshard_after_backward(k == steps - 1)
                step(model, tokens[turn, k, rank], targets[turn, k, rank], normalizer)
        count = (targets[turn] != -100).sum()
        step(whole, *(each[turn].flatten(0, -2) for each in (tokens, targets)), count)
    fused = {} if deferral is None else {"fused": deferral.fused, "materialized": deferral.materialized}
    return {"errors": largest_errors(model, whole), **collectives.counts, **fused}
