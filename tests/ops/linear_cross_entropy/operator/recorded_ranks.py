"""Define what test_recorded_calls_of_ranks.py runs as several processes.

A divided call that is recorded has the bits of the call that was not. Each scenario asserts what it
finds, on every rank.

Shapes: N tokens of a rank, D features, V classes of all ranks.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from lowtide.core.recording import recorded, steps
from lowtide.ops.linear_cross_entropy.engines import row_loss, row_loss_triton
from tests.ops.linear_cross_entropy.ranks.running import running_on
from tests.support.ranks import DEVICE

N, D, V = 24, 16, 304
BF16 = torch.bfloat16
EXTRAS = ("linear_bias", "weight", "logit_scale", "row_weight", "normalizer")
SEVERAL_CHUNKS = {"cpu": 70_000, "cuda": 140_000}[DEVICE]

CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "half precision": {"dtype": BF16},
    "several chunks": {"rows": 64, "workspace": SEVERAL_CHUNKS},
    "several chunks, half precision": {"rows": 64, "workspace": SEVERAL_CHUNKS, "dtype": BF16},
    "few tokens": {"rows": 8, "dtype": BF16},
    "options": {"softcap": 3.0, "z_loss": 0.1, "extras": EXTRAS},
    "label smoothing": {"label_smoothing": 0.1, "extras": ("weight",)},
    "own tokens": {"tokens_sharded": True},
    "own tokens, none": {"tokens_sharded": True, "reduction": "none", "extras": ("row_weight",)},
    "own tokens, other numbers": {"tokens_sharded": True, "rows": 16},
    "none": {"reduction": "none"},
    "none, options": {"reduction": "none", "z_loss": 0.1, "extras": EXTRAS[:-1]},
    "log-probabilities": {"log_probs": True},
    "log-probabilities, options": {
        "log_probs": True, "softcap": 3.0, "extras": ("linear_bias", "logit_scale"), "dtype": BF16,
    },
    "uneven": {"first": 256},
    "a rank without classes": {"first": V},
    "segments": {"segments": 4},
}  # fmt: skip


def classes_of(rank: int, first: int) -> slice:
    return slice(first, V) if rank else slice(0, first)


def made(case: dict[str, Any], rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and options of this rank; `first` classes are on the first rank."""
    case = {"rows": N, "dtype": torch.float32, "extras": (), "first": V // 2, **case}
    rows, dtype, own = case.pop("rows"), case.pop("dtype"), classes_of(rank, case.pop("first"))
    torch.manual_seed(3)
    tensors = {"input": torch.randn(rows, D), "linear_weight": torch.randn(V, D)[own]}
    tensors["target"] = torch.randint(V, (rows,))
    tensors["target"][3] = -100
    extras = {
        "linear_bias": torch.randn(V)[own],
        "weight": torch.rand(V)[own],
        "logit_scale": torch.tensor(0.8),
        "row_weight": torch.rand(rows),
        "normalizer": torch.tensor(7.0),
    }
    tensors |= {name: extras[name] for name in case.pop("extras")}
    trained = ("input", "linear_weight", "linear_bias", "logit_scale")
    for name, each in tensors.items():
        half = name in trained[:3]
        moved = each.contiguous().to(DEVICE, dtype if half else each.dtype)
        tensors[name] = moved.requires_grad_(name in trained)
    return tensors, {"first_class": own.start, "num_classes": V, "group": dist.group.WORLD, **case}


def results_of(tensors: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    options = {**options, "backend": "triton"}
    if options.pop("log_probs", False):
        return tuple(lowtide.linear_log_probs(**tensors, **options))
    return (lowtide.linear_cross_entropy(**tensors, **options),)


def gradients_of(
    results: tuple[Tensor, ...], tensors: dict[str, Tensor], upstream: dict[int, Tensor]
) -> list[Tensor]:
    """The gradients of what is trained; `upstream` are those of some results, by their places."""
    trained = [each for each in tensors.values() if each.requires_grad]
    used = [results[place] for place in upstream]
    return list(torch.autograd.grad(used, trained, list(upstream.values()), allow_unused=True))


def counted(patch: pytest.MonkeyPatch) -> list[recorded.Recording]:
    """The recordings that ran; a call is recorded the first time that it goes straight."""
    patch.setattr(recorded, "RECORDED_CALL", 1)
    # It reads a target on the CPU, which a rehearsal cannot.
    for module in (row_loss, row_loss_triton):
        patch.setattr(module, "check_classes", lambda *_: None)
    runs, run = [], recorded.Recording.run

    def counted_run(self: Any, tensors: Any) -> Any:
        runs.append(self)
        return run(self, tensors)

    patch.setattr(recorded.Recording, "run", counted_run)
    return runs


def upstream_of(tensors: dict[str, Tensor], options: dict[str, Any]) -> dict[int, Tensor]:
    by_row = options.get("log_probs") or options.get("reduction") == "none"
    torch.manual_seed(4)
    places = range(3 if options.get("log_probs") else 1)
    size = len(tensors["input"]) if by_row else ()
    return {place: torch.randn(size, device=DEVICE) for place in places}


def computed(
    tensors: dict[str, Tensor], options: dict[str, Any], upstream: dict[int, Tensor]
) -> list[Tensor]:
    results = results_of(tensors, options)
    return [*(each.detach() for each in results), *gradients_of(results, tensors, upstream)]


def assert_same(first: list[Tensor], second: list[Tensor], what: Any) -> None:
    assert all(map(torch.equal, first, second)), what


def same_bits(rank: int, names: Iterable[str] = CASES) -> None:
    """As many collectives end as begin."""
    for name in names:
        tensors, options = made(CASES[name], rank)
        upstream = upstream_of(tensors, options)
        with running_on("exponentials"), pytest.MonkeyPatch.context() as patch:
            runs, found = counted(patch), []
            found = [computed(tensors, options, upstream) for _ in range(3)]
        by_row = options.get("log_probs") or options.get("reduction") == "none"
        empty = not len(tensors["linear_weight"])  # a rank without classes goes by the operator
        assert len(runs) == (0 if empty else 4 if by_row else 2), (name, len(runs))
        for each in found[1:]:
            assert_same(each, found[0], name)
        for each in runs:
            kinds = [type(step) for step, _ in each.steps]
            assert kinds.count(steps.BeginStep) == kinds.count(steps.End) > 0, name


def same_bits_of_few(rank: int) -> None:
    few = "few tokens", "log-probabilities, options"
    same_bits(rank, (*few, "a rank without classes"))


def other_sizes_of_one_rank(rank: int) -> None:
    """A rank that takes smaller chunks is found out, although the other's call is as before."""
    for case in ({}, {"reduction": "none"}, {"log_probs": True}):
        tensors, options = made({"rows": 64, "dtype": BF16, **case}, rank)
        upstream, found = upstream_of(tensors, options), []
        with running_on("exponentials"), pytest.MonkeyPatch.context() as patch:
            runs = counted(patch)
            for workspace in (None, None, SEVERAL_CHUNKS, None, SEVERAL_CHUNKS, None):
                own = {"workspace": workspace if rank else None}
                found.append(computed(tensors, options | own, upstream))
        assert runs
        for place in (1, 3, 5):
            assert_same(found[place], found[0], (case, place))
        assert_same(found[4], found[2], case)
        for one, other in zip(found[2], found[0]):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def used_results(rank: int) -> None:
    """Results that have a gradient here, in any order; where ranks have tokens of their own, the
    other rank may use other results.
    """
    choices = ((0,), (1,), (0, 2), (0, 1, 2))
    for sharded in (False, True):
        tensors, options = made({"log_probs": True, "tokens_sharded": sharded}, rank)
        upstream, found = upstream_of(tensors, options), {}
        with running_on("exponentials"), pytest.MonkeyPatch.context() as patch:
            runs = counted(patch)
            for _ in range(3):
                for place in range(len(choices)):
                    own = choices[place - 1 if sharded and rank else place]
                    used = {each: upstream[each] for each in own}
                    gradients = computed(tensors, options, used)
                    assert_same(gradients, found.setdefault(place, gradients), (sharded, place))
        assert len(runs) > 16, (sharded, len(runs))


def errors(rank: int) -> None:
    """An error of one rank's call reaches the other, whose call is remembered; so does one that
    comes from another call. Later calls are as before.
    """
    tensors, options = made({}, rank)
    upstream = upstream_of(tensors, options)
    with running_on("exponentials"), pytest.MonkeyPatch.context() as patch:
        counted(patch)
        first, _ = (computed(tensors, options, upstream) for _ in range(2))
        for change, message in (
            ({"softcap": -1.0}, "softcap"),
            ({"z_loss": 0.5}, "z_loss must be the same"),
            ({"log_probs": True}, "operator must be the same"),
        ):
            with pytest.raises((ValueError, RuntimeError), match=message):
                results_of(tensors, options | (change if rank else {}))
            assert_same(computed(tensors, options, upstream), first, message)


def new_group(rank: int) -> None:
    """A later group of the same name is another group."""
    tensors, options = made({}, rank)
    upstream, found = upstream_of(tensors, options), []
    with running_on("exponentials"), pytest.MonkeyPatch.context() as patch:
        runs = counted(patch)
        for _ in range(2):
            own = {"group": dist.new_group([0, 1])}
            name = own["group"].group_name
            found += [computed(tensors, options | own, upstream) for _ in range(3)]
            dist.destroy_process_group(own["group"])
        assert len(runs) == 4, name
    for each in found[1:]:
        assert_same(each, found[0], name)


SCENARIOS: dict[str, Callable[[int], None]] = {
    each.__name__: each
    for each in (same_bits, same_bits_of_few, other_sizes_of_one_rank, used_results, errors, new_group)
}


def run(kind: str, rank: int) -> dict[str, Any]:
    torch.set_default_device(None)  # its mode sees each call, which then is not remembered
    SCENARIOS[kind](rank)
    return {}
