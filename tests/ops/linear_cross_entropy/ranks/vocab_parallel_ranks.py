"""What test_vocab_parallel.py runs as several processes: calls whose classes are divided over the
ranks, each held against the dense truth on all classes and tokens. A result has the cases that
failed, and how many ran.

Shapes: N tokens, D features, V classes of all ranks.
"""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, product
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import lowtide
from lowtide.ops.linear_cross_entropy.planning import requirements
from tests.ops.linear_cross_entropy.ranks.running import engines_counted, running_on
from tests.support.budgets import Inputs
from tests.support.exchange import of_all_ranks
from tests.support.half_products import half_products
from tests.support.loss import check, check_log_probs, make_inputs, rows_for
from tests.support.ranks import DEVICE, generator, mesh_of

FEWEST, FEATURES, CLASSES = 13, 5, 23
N, D, V = FEWEST, FEATURES, CLASSES
REAL = (4096, 512, 39_987)  # N, D and V for the engine of a card, which auto chooses for them
REAL_ROOM = (None, 1 << 26, 1 << 25)  # one chunk; several, with a packed sum; class by class
# On CUDA a plan counts so much more than on the CPU, for the way in which CUDA allocates.
ROOM_ON_CUDA = 65536 - 8192


def room(workspace: int) -> int:
    """A workspace in which a card has as much room as the CPU has in one of so many bytes."""
    return workspace + (ROOM_ON_CUDA if DEVICE == "cuda" else 0)


def few_rows() -> int:
    """Bytes of a workspace for chunks of a few rows."""
    return room(40_000) + 420 * (N - FEWEST)


LAYOUTS = ("even", "uneven", "empty", "reversed")
TARGETS = ("any", "one rank", "rank without")
WAYS = ("group", "dtensor", "tokens", "dtensor tokens")

# Options of the loss; "bias", "class_weight", "logit_scale", "row_weight" and "probabilities" are
# tensors.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "bias": {"bias": True},
    "class weights": {"class_weight": True},
    "class weights, smoothing": {"class_weight": True, "label_smoothing": 0.2},
    "smoothing": {"label_smoothing": 0.1},
    "soft cap": {"softcap": 2.0, "bias": True},
    "learned scale": {"logit_scale": True},
    "z-loss": {"z_loss": 0.1},
    "probabilities": {"probabilities": True},
    "probabilities, weights": {"probabilities": True, "class_weight": True, "label_smoothing": 0.1},
    "row weights": {"row_weight": True},
    "all": {
        **{"bias": True, "class_weight": True, "logit_scale": True, "row_weight": True},
        **{"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.05},
    },
    "all, none": {
        **{"bias": True, "class_weight": True, "logit_scale": True, "row_weight": True},
        **{"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.05, "reduction": "none"},
    },
}
TENSORS = ("bias", "class_weight", "logit_scale", "row_weight", "probabilities")


def sizes_of(layout: str, ranks: int) -> list[int]:
    """The classes of each rank."""
    if layout == "even":  # torch.chunk's
        size = -(-V // ranks)
        return [max(0, min(size, V - rank * size)) for rank in range(ranks)]
    if layout == "empty":
        return [V - 2 * (ranks - 2), 0, *[2] * (ranks - 2)]
    return [V - sum(range(1, ranks)), *range(1, ranks)]


def first_classes(layout: str, ranks: int) -> list[int]:
    sizes = sizes_of(layout, ranks)
    if layout == "reversed":
        return [V - end for end in accumulate(sizes)]
    return [end - size for end, size in zip(accumulate(sizes), sizes)]


def tokens_of(ranks: int, *, even: bool) -> list[int]:
    """The tokens of each rank; those of a DTensor are torch.chunk's."""
    size = -(-N // ranks)
    if even:
        return [max(0, min(size, N - rank * size)) for rank in range(ranks)]
    return [N - sum(range(ranks)) + 0, *range(1, ranks)][:ranks]


def inputs_of(target: str, layout: str, options: dict[str, Any], dtype: torch.dtype) -> Inputs:
    """The same on all ranks; `target` says where the rows' targets are."""
    torch.manual_seed(len(layout) + 7 * len(target) + 31 * len(options))
    given = {name: options[name] for name in TENSORS if name in options}
    inputs = make_inputs(N, D, V, device=DEVICE, dtype=dtype, **given)
    if inputs.probabilities:
        return inputs
    rank = dist.get_world_size() - 1
    first = first_classes(layout, rank + 1)[rank]
    size = sizes_of(layout, rank + 1)[rank]
    label = inputs.target
    if target == "one rank" and size:
        label = torch.where(label == -100, label, first + label % size)
    if target == "rank without":  # its tokens, where they are sharded; and none of its classes
        label = torch.where((label >= first) & (label < first + size), (first + size) % V, label)
        label[N - N // (rank + 1) :] = -100
    row_weight = inputs.row_weight
    if row_weight is not None:
        row_weight = torch.ones_like(row_weight).masked_fill(label == -100, torch.nan)
    return replace(inputs, target=label, row_weight=row_weight)


class Shards:
    """A rank's tensors of a call in a way of passing them, and all ranks' whole leaf gradients."""

    def __init__(self, inputs: Inputs, layout: str, way: str) -> None:
        self.inputs, self.way = inputs, way
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtensor, self.by_tokens = "dtensor" in way, "tokens" in way
        sizes, firsts = sizes_of(layout, self.ranks), first_classes(layout, self.ranks)
        self.first, self.size = firsts[self.rank], sizes[self.rank]
        self.classes = slice(self.first, self.first + self.size)
        self.tokens = slice(0, N)
        if self.by_tokens:
            ends = [*accumulate(tokens_of(self.ranks, even=self.dtensor))]
            self.tokens = slice(0 if self.rank == 0 else ends[self.rank - 1], ends[self.rank])
        self.mesh = mesh_of(self.ranks) if self.dtensor else None
        self.leaves: dict[str, Tensor] = {}
        self.arguments = {
            "input": self._part("input", 0, self.tokens),
            "linear_weight": self._part("linear_weight", 0, self.classes),
            "target": self._part("target", 1, self.classes)
            if inputs.probabilities
            else self._part("target", 0, self.tokens),
            "linear_bias": self._part("linear_bias", 0, self.classes),
            "logit_scale": self._part("logit_scale", None, None),
        }
        self.of_loss = {
            "weight": self._part("weight", 0, self.classes),
            "row_weight": self._part("row_weight", 0, self.tokens),
        }
        self.options: dict[str, Any] = {}
        if not self.dtensor:
            self.options = {"group": dist.group.WORLD, "first_class": self.first, "num_classes": V}
            if self.by_tokens:
                self.options["tokens_sharded"] = True

    def _part(self, name: str, dim: int | None, part: slice | None) -> Tensor | None:
        whole = getattr(self.inputs, name)
        if whole is None:
            return None
        own = whole.detach()
        if dim is not None:
            own = own[:, part] if dim else own[part]
        own = own.clone().requires_grad_(whole.requires_grad)
        if self.mesh is not None:
            replicated = dim is None or (part == self.tokens and not self.by_tokens)
            placement = Replicate() if replicated else Shard(dim)
            own = DTensor.from_local(
                own.detach(),
                self.mesh,
                [placement],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            ).requires_grad_(whole.requires_grad)
        if whole.requires_grad:
            self.leaves[name] = own
        return own

    def rows(self, vector: Tensor) -> Tensor:
        """Of a vector of all tokens this rank's part, as results are passed."""
        own = vector[self.tokens]
        if self.mesh is None:
            return own
        placement = Shard(0) if self.by_tokens else Replicate()
        return DTensor.from_local(
            own, self.mesh, [placement], run_check=False, shape=vector.shape, stride=vector.stride()
        )

    def whole_rows(self, own: Tensor) -> Tensor:
        own = own.to_local() if isinstance(own, DTensor) else own
        own = own.detach()
        if not self.by_tokens:
            return own
        return torch.cat(of_all_ranks(own))

    def gradients(self) -> dict[str, Tensor]:
        own = {}
        for name, leaf in self.leaves.items():
            assert leaf.grad is not None, name
            gradient = leaf.grad
            if isinstance(gradient, DTensor):
                assert gradient.placements == leaf.placements, name
                gradient = gradient.to_local()
            own[name] = gradient
        found = of_all_ranks((self.first, self.tokens.start, own))
        by_class = [
            each for _, _, each in sorted(found, key=lambda rank: (rank[0], len(rank[2]["linear_weight"])))
        ]
        by_token = [each for *_, each in sorted(found, key=lambda rank: rank[1])]
        whole = {}
        for name in own:
            if name in ("linear_weight", "linear_bias"):
                whole[name] = torch.cat([each[name] for each in by_class])
            elif name == "input" and self.by_tokens:
                whole[name] = torch.cat([each[name] for *_, each in found])
            else:
                whole[name] = own[name]
                assert all(torch.equal(each[name], own[name]) for each in by_token), f"{name} differs"
        return whole


def whole(result: Tensor) -> Tensor:
    return result.to_local() if isinstance(result, DTensor) else result


def loss_case(ran, dtype, layout, target, way, name, workspace=None, backend="auto") -> None:
    options, before = OPTIONS[name], ran["cpu_logits"]
    inputs = inputs_of(target, layout, options, dtype)
    shards = Shards(inputs, layout, way)
    given = {key: value for key, value in options.items() if key not in TENSORS}
    loss = lowtide.linear_cross_entropy(
        **shards.arguments, **shards.of_loss, **shards.options, **given, workspace=workspace, backend=backend
    )
    assert isinstance(loss, DTensor) == shards.dtensor
    upstream: Any = torch.randn(N, dtype=torch.float64, generator=generator(3))
    if options.get("reduction") == "none":
        loss.backward(shards.rows(upstream.to(loss.dtype)))
        found = shards.whole_rows(loss)
    else:
        upstream = 2.0  # another factor would round half precision once more
        (loss * upstream).backward()
        found = whole(loss).detach()
    with half_products(ran["cpu_logits"] > before):
        check({"loss": found, **shards.gradients()}, inputs, upstream=upstream, **given)


def log_probs_case(ran, dtype, layout, target, way, name, workspace=None, backend="auto") -> None:
    before = ran["cpu_logits"]
    options = {
        key: value for key, value in OPTIONS[name].items() if key in ("bias", "logit_scale", "softcap")
    }
    inputs = inputs_of(target, layout, options, dtype)
    shards = Shards(inputs, layout, way)
    given = {key: value for key, value in options.items() if key not in TENSORS}
    found = lowtide.linear_log_probs(
        **shards.arguments, **shards.options, **given, workspace=workspace, backend=backend
    )
    seeded = generator(3)
    upstream = [torch.randn(N, dtype=torch.float64, generator=seeded) for _ in range(3)]
    torch.autograd.backward(found[:3], [shards.rows(each.to(found[0].dtype)) for each in upstream])
    results = {key: shards.whole_rows(each) for key, each in found._asdict().items()}
    with half_products(ran["cpu_logits"] > before):
        check_log_probs({**results, **shards.gradients()}, inputs, upstream, **given)


LOG_PROBS = ("plain", "bias", "soft cap", "learned scale")


def cases(kind: str):
    """Those of a kind: all combinations; so many that each pair of values occurs; or few, in which
    each way to pass shards occurs with all other values, and each layout with all targets. Those of
    real sizes have each way with each option that the engine without logits takes."""
    how, dtype = kind.split()
    every = [
        (case, getattr(torch, dtype), *rest)
        for case, names in ((loss_case, OPTIONS), (log_probs_case, LOG_PROBS))
        for (*rest,) in product(LAYOUTS, TARGETS, WAYS, names)
        if possible(*rest)
    ]
    if how == "all":
        return every
    if how == "real":
        return [each for each in every if is_real(*each[2:])]
    if how.isdigit():  # so many of them
        return Random(1).sample(every, int(how))
    Random(0).shuffle(every)  # otherwise most cases would have the first value of each list
    chosen, covered = [], set()
    for each in every:
        case, _, layout, target, way, name = each
        pairs = {(case, way, name), (layout, way), (target, way), (layout, target)}
        if how == "pairs":
            pairs |= {(case, layout, name), (case, target, name)}
        if not pairs <= covered:
            chosen.append(each)
            covered |= pairs
    return chosen


def is_real(layout: str, target: str, way: str, name: str) -> bool:
    """Each way with each option in even shards; the other shards and targets of a plain call."""
    if "all" in name or "probabilities" in name:
        return False
    return (layout, target) == ("even", "any") or (name == "plain" and (layout == "even" or target == "any"))


def possible(layout: str, target: str, way: str, name: str) -> bool:
    if "dtensor" in way and layout != "even":
        return False  # a DTensor's shards are torch.chunk's
    if "probabilities" in OPTIONS[name]:
        return target == "any" and "tokens" not in way
    return True


def matrix(kind: str, ran: Counter[str], features: int = FEATURES, **options: Any) -> dict[str, Any]:
    global N, D, V
    real = kind.startswith("real ")
    dtype = getattr(torch, kind.split()[1])
    halves = DEVICE == "cuda" or requirements.FEWEST_WEIGHTS == 0  # products of half precision
    N, D, V = REAL if real else (rows_for("cuda" if halves else DEVICE, dtype, FEWEST), features, CLASSES)
    workspaces = REAL_ROOM if real else (None, few_rows())
    failed, every = [], cases(kind)
    for number, (case, dtype, *rest) in enumerate(every):
        try:
            case(ran, dtype, *rest, workspace=workspaces[number % len(workspaces)], **options)
        except AssertionError as error:
            failed.append(f"{case.__name__} {rest}: {error}")
    return {"count": len(every), "failed": failed}


def run(kind: str, rank: int) -> dict[str, Any]:
    kind, *engines = kind.split(" on ")
    if not engines:
        with engines_counted() as ran:
            return {**matrix(kind, ran), "engines": ran}
    options = {}
    if engines == ["exponentials"]:
        options = {"backend": "triton", "features": 8}  # tensor maps need rows of 16 bytes
    with running_on(*engines) as ran:
        return {**matrix(kind, ran, **options), "engines": ran}
