"""What test_vocab_parallel_exponentials.py runs as two processes: divided heads on the engines that
store exponentials in place of logits. Each scenario asserts what it finds, on every rank; truth is
dense float64.

Shapes: N tokens, D features, V classes of all ranks, V_r of one.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.ops.linear_cross_entropy.operator import ops
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import FEWEST_CLASSES_PER_TOKEN
from tests.ops.linear_cross_entropy.ranks.counted_collectives import counted
from tests.ops.linear_cross_entropy.ranks.place import Place
from tests.ops.linear_cross_entropy.ranks.running import running_on
from tests.support.ranks import DEVICE
from tests.support.rehearsals import in_rehearsal

N, D, V = 24, 8, 262  # each rank's sample leaves out every second and third of its 131 classes
# Workspaces for several chunks; what a plan counts beside a row's bytes is more on a card.
SEVERAL = {"cpu": (35_000, 70_000, 140_000), "cuda": (80_000, 95_000, 200_000)}[DEVICE]
SMOOTHING_ROOM = {"cpu": (40_000, 1_000_000), "cuda": (95_000, 1_000_000)}[DEVICE]
OF_LOSSES = {"rtol": 2e-5, "atol": 1e-6}


class Case:
    """One rank's call on an engine, and the dense truth of all classes."""

    def __init__(self, engine: str) -> None:
        self.place, self.engine = Place(V), engine
        half = engine == "cpu_exponentials" or DEVICE == "cuda"  # the interpreter's tiles are of float32
        self.dtype = torch.bfloat16 if half else torch.float32
        # Sums are float32; operands, exponentials and gradients are rounded to the dtype.
        self.tolerance = 3e-2 if half else 2e-5
        torch.manual_seed(7)
        self.x, self.w = (torch.randn(size, D).to(self.dtype) for size in (N, V))
        self.target = torch.arange(N) * 37 % V
        self.bias: Tensor | None = None

    def run(
        self, *, tokens: bool = False, upstream: Tensor | None = None, log_probs: bool = False, **options: Any
    ) -> tuple[Any, list[Tensor]]:
        """The results of all tokens, and the gradients of input, weight and bias, whole."""
        place, own = self.place, self.place.tokens if tokens else slice(None)
        leaves = [place.leaf(self.x, own), place.leaf(self.w, place.classes)]
        if self.bias is not None:
            leaves.append(place.leaf(self.bias, place.classes))
            options["linear_bias"] = leaves[2]
        options |= {"group": place.group, "tokens_sharded": tokens}
        options["backend"] = "triton" if self.engine == "exponentials" else "auto"
        call = lowtide.linear_log_probs if log_probs else lowtide.linear_cross_entropy
        with running_on(self.engine) as engines:
            found = call(*leaves[:2], self.target[own], **options)
            result = found.log_prob if log_probs else found
            result.backward(None if upstream is None else upstream[own])
        assert engines[self.engine] == engines.total() > 0
        gradients = [each.grad for each in leaves]
        x_grad, *of_classes = gradients
        if tokens:
            x_grad = place.whole(x_grad)
            if log_probs or options.get("reduction") == "none":
                result = place.whole(result.detach())
        return (found if log_probs else result.detach()), [x_grad, *map(place.whole, of_classes)]

    def truth(
        self, reduction: str = "mean", upstream: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, list[Tensor]]:
        leaves = [self.place.leaf(each.double()) for each in (self.x, self.w)]
        if self.bias is not None:
            leaves.append(self.place.leaf(self.bias.double()))
        logits = leaves[0] @ leaves[1].T + (leaves[2] if self.bias is not None else 0)
        loss = torch.nn.functional.cross_entropy(logits, self.target, reduction=reduction, **options)
        loss.backward(None if upstream is None else upstream.double())
        return loss.detach(), [each.grad for each in leaves]

    def check(self, found: tuple[Tensor, list[Tensor]], truth: tuple[Tensor, list[Tensor]]) -> None:
        loss, gradients = found
        torch.testing.assert_close(loss.double(), truth[0], **OF_LOSSES)
        for gradient, wanted in zip(gradients, truth[1]):
            assert gradient.isfinite().all()
            error = (gradient.double() - wanted).norm() / wanted.norm()
            assert error < self.tolerance, error


@contextlib.contextmanager
def single_products_counted() -> Iterator[list[bool]]:
    """Yields an entry for each weight gradient that a single GEMM over all tokens forms."""
    counted: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton") is not None:
            from lowtide.ops.linear_cross_entropy.engines.weight_gradient import accumulators

            def add_product(self: Any, *arguments: Any, **options: Any) -> None:
                if not in_rehearsal():
                    counted.append(True)
                of_product(self, *arguments, **options)

            of_product = accumulators.RoundedProduct.add_product
            patch.setattr(accumulators.RoundedProduct, "add_product", add_product)
        yield counted


def ways(case: Case) -> None:
    """Loss and gradients of a mean, and of rows, of replicated tokens and of each rank's own."""
    upstream = torch.linspace(-1, 1, N)
    for tokens in (False, True):
        case.check(case.run(tokens=tokens), case.truth())
        found = case.run(tokens=tokens, reduction="none", upstream=upstream)
        case.check(found, case.truth("none", upstream))


def far_references(engine: str) -> None:
    """A logit far above the target's and all that a rank's sample has, on one rank or both."""
    for places in ((1,), (132,), (1, 132)):
        case = Case(engine)
        case.x[:, 0] = 1
        for place in places:
            case.w[place] = 0
            case.w[place, 0] = 96
        ways(case)


def confident(engine: str) -> None:
    """A token with p near 1 keeps the digits of its loss, and 1 - p those of its gradients."""
    case = Case(engine)
    case.w *= 0.25
    case.w[:, 1] = 0
    case.target = torch.arange(N) % 2 * 131  # one class on each rank
    case.w[0] = case.w[131] = 0
    case.x[:, 1], case.x[::2, 1] = -16, 16
    case.w[0, 1], case.w[131, 1] = 1.5, -1.5
    truth = case.truth("none", torch.ones(N))
    assert 0 < truth[0].max() < 1e-6
    loss, (dx, dw) = case.run(reduction="none", upstream=torch.ones(N))
    torch.testing.assert_close(loss.double(), truth[0], rtol=1e-3, atol=0)
    for found, wanted in ((dx, truth[1][0]), (dw, truth[1][1])):
        assert (found.double() - wanted).norm() / wanted.norm() < case.tolerance


def excluded(engine: str) -> None:
    """Classes excluded by a bias of -inf: all but one of a rank, and all of a rank."""
    for first, last in ((0, 131), (0, 130), (131, V), (132, V)):
        case = Case(engine)
        case.bias = torch.zeros(V)
        case.bias[first:last] = -torch.inf
        allowed = (case.bias == 0).nonzero()[:, 0]
        case.target = allowed[torch.arange(N) * 37 % len(allowed)]
        ways(case)
        case.target[0] = first
        loss, _ = case.run(reduction="none", upstream=torch.ones(N))
        assert loss[0] == torch.inf
        assert loss[1:].isfinite().all()
        if engine == "exponentials":
            case.target[0] = allowed[0]
            found, _ = case.run(log_probs=True, upstream=torch.ones(N))
            of_losses = OF_LOSSES if DEVICE == "cuda" else {"rtol": 2 * 2**-23, "atol": 1e-7}  # two roundings
            wanted = case.truth("none", torch.ones(N))[0]
            torch.testing.assert_close(-found.log_prob.double(), wanted, **of_losses)
            logits = case.x.double() @ case.w.double().T + case.bias
            p = logits.softmax(1)
            entropy = -(p * p.log()).nan_to_num(0).sum(1)
            torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
            assert torch.equal(found.argmax, logits.argmax(1))


def not_finite(engine: str) -> None:
    """A logit that is NaN or +inf, on either rank, reaches the loss, as in torch; one of an ignored
    row reaches nothing.
    """
    for place in (5, 137):
        for value in (torch.nan, torch.inf):
            case = Case(engine)
            case.w[place, 0], case.x[:, 0] = value, 1
            loss, (dx, _) = case.run()
            assert loss.isnan()
            assert dx.isnan().any()
    for tokens in (False, True):
        case = Case(engine)
        case.target[::3] = -100
        truth = case.truth()
        case.x[::6], case.x[3::6] = torch.nan, torch.inf
        case.check(case.run(tokens=tokens), truth)
        assert case.run(tokens=tokens, reduction="none", upstream=torch.ones(N))[0].isfinite().all()


def small_workspaces(engine: str) -> None:
    """Several chunks, dW as a sum beside it or class by class, in bfloat16."""
    case = Case(engine)
    case.dtype, case.tolerance = torch.bfloat16, 3e-2
    case.x, case.w = case.x.bfloat16(), case.w.bfloat16()
    case.bias = torch.linspace(-1, 1, V).bfloat16()
    for workspace in SEVERAL:
        case.check(case.run(workspace=workspace), case.truth())


def smoothing(engine: str) -> None:
    """All classes of each token, where dW is a sum of chunks, and where it is formed by blocks."""
    if engine == "cpu_exponentials":
        return  # it takes no label smoothing of a sharded head
    case, ways = Case(engine), set()
    case.dtype, case.tolerance = torch.bfloat16, 3e-2
    case.x, case.w = torch.randn(N, 64).bfloat16(), (torch.randn(V, 64) / 8).bfloat16()
    for workspace in (None, *SMOOTHING_ROOM):
        with plans_made() as plans:
            case.check(case.run(workspace=workspace, label_smoothing=0.9), case.truth(label_smoothing=0.9))
        ways |= {each.weight_gradient for each in plans}
    assert ways > {"class_blocks"}, ways


@contextlib.contextmanager
def plans_made() -> Iterator[list[Any]]:
    """Yields the plans that are made."""
    found: list[Any] = []
    make_plan = ops.make_plan

    def made(*call: Any) -> Any:
        found.append(make_plan(*call))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "make_plan", made)
        yield found


def unlike_layouts(engine: str) -> None:
    """A rank whose tensors lie otherwise copies them: all ranks still choose one engine."""
    case = Case(engine)
    whole = case.truth()
    place, backend = case.place, "triton" if engine == "exponentials" else "auto"
    x, w = place.leaf(case.x), place.leaf(case.w, place.classes)
    if place.rank:
        x, w = place.leaf(x.T.contiguous()), place.leaf(w.T.contiguous())
    with running_on(engine) as engines:
        call = (x.T, w.T) if place.rank else (x, w)
        loss = lowtide.linear_cross_entropy(*call, case.target, group=place.group, backend=backend)
        loss.backward()
    assert engines == {engine: 1}
    dx, dw = (each.grad.T if place.rank else each.grad for each in (x, w))
    case.check((loss.detach(), [dx, place.whole(dw.contiguous())]), whole)


def few_tokens(engine: str) -> None:
    """Few tokens beside the classes of one rank, many beside those of the other, which may have
    none: one engine and the same chunks on both. A rank with few forms dW by a single GEMM over all
    tokens, but not where the other rank's workspace allows no chunk of all tokens.
    """
    case = Case(engine)
    case.dtype, case.tolerance = torch.bfloat16, 3e-2
    torch.manual_seed(8)
    case.x, case.w = torch.randn(8, 128).bfloat16(), (torch.randn(V, 128) / 8).bfloat16()
    case.target = torch.arange(8) * 37 % V
    truth = case.truth()
    backend = "triton" if engine == "exponentials" else "auto"
    small = 32_000 if DEVICE == "cpu" else 75_000
    for first, workspaces in product((131, 200, 255, V), ((None, None), (small, small), (None, small))):
        classes = slice(first, V) if case.place.rank else slice(0, first)
        x, w = case.place.leaf(case.x), case.place.leaf(case.w, classes)
        how = {"first_class": classes.start, "num_classes": V, "workspace": workspaces[case.place.rank]}
        with running_on(engine) as engines, single_products_counted() as counted:
            loss = lowtide.linear_cross_entropy(
                x, w, case.target, group=case.place.group, backend=backend, **how
            )
            loss.backward()
        assert len(engines) == 1, engines
        case.check((loss.detach(), [x.grad, case.place.whole(w.grad)]), truth)
        few = w.shape[0] >= 8 * FEWEST_CLASSES_PER_TOKEN
        expected = engines["exponentials"] and few and workspaces == (None, None)
        assert len(counted) == expected, (first, workspaces, counted)


def collectives(engine: str) -> None:
    """One gather of three numbers a row and one sum of dX a chunk, the agreement; backward none."""
    case = Case(engine)
    for workspace in (None, SEVERAL[0]):
        with counted() as calls:
            case.run(workspace=workspace)
        (agreement, *rest) = calls
        assert agreement == ("gather", 2048)
        gathers = [size for kind, size in rest if kind == "gather"]
        sums = [size for kind, size in rest if kind == "sum_"]
        assert sum(gathers) == 3 * N * 4
        assert sum(sums) == N * D * 4
        assert len(gathers) == len(sums) == len(rest) / 2
        assert (len(gathers) > 1) == (workspace is not None)
    with counted() as calls:
        case.run(reduction="none", upstream=torch.ones(N))
    assert [kind for kind, _ in calls] == ["gather", "gather", "gather", "sum_"]


SCENARIOS = {
    each.__name__: each
    for each in (
        *(far_references, confident, excluded, not_finite, small_workspaces, smoothing, unlike_layouts),
        few_tokens,
        collectives,
    )
}


def run(kind: str, rank: int) -> dict[str, Any]:
    scenario, engine = kind.split(" on ")
    SCENARIOS[scenario](engine)
    return {}
