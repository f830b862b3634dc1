"""All that the golden set takes from inside the package. Modules move; recorded names stay."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lowtide.memory import peak_memory

__all__ = ["as_on_a_card", "chosen_engines", "loss_of_terms", "peak_memory", "quicken_interpreter"]


def loss_of_terms(inputs: Sequence[Tensor], weights: Sequence[Tensor], target: Tensor, **options: Any) -> Any:
    """Compute the loss of a head of several linear terms, as deferred logits do for an adapter."""
    from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy

    return cross_entropy(inputs, weights, target, **options)


@contextlib.contextmanager
def chosen_engines() -> Iterator[set[str]]:
    """Collect the engine of each operator run in the block, and how it forms a weight gradient."""
    found: set[str] = set()
    with contextlib.ExitStack() as stack:
        for module, name, describe in (
            ("lowtide.ops.linear_cross_entropy.operator.ops", "make_plan", _of_loss),
            ("lowtide.ops.distillation.ops", "make_plan", _of_distillation),
            (
                "lowtide.ops.attention.dispatch",
                "choose_backend",
                lambda choice, *_: f"attention: {choice.backend}",
            ),
        ):
            owner = import_module(module)
            observed = _observed(getattr(owner, name), describe, found)
            stack.enter_context(mock.patch.object(owner, name, observed))
        yield found
    found.discard("attention: higher_order")  # the records name no backend there


def _observed(function: Callable[..., Any], describe: Callable[..., str], found: set[str]) -> Any:
    def observed(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if not torch.compiler.is_compiling():
            found.add(describe(result, *arguments))
        return result

    return observed


# The names in the records of engines, and of ways to form the weight's gradient.
RECORDED = {
    "logits_torch": "torch",
    "logits_triton": "triton",
    "soft_targets": "distances",
    "single_product": "at_once",
    "packed": "split",
    "class_blocks": "by_class",
}


def _of_loss(plan: Any, call: Any) -> str:
    bits = f" {plan.sum_bits}" if plan.weight_gradient == "packed" and plan.backend == "triton" else ""
    way = RECORDED.get(plan.weight_gradient, plan.weight_gradient)
    way = f", {way}{bits}" if plan.needs_grad.weights[0] else ""
    engine = RECORDED.get(plan.engine, plan.engine)
    return f"loss: {engine}{way}{', several chunks' if plan.rows < call.head.tokens else ''}"


def _of_distillation(plan: Any, *_: Any) -> str:
    return f"distillation: {plan.backend}, {RECORDED.get(plan.weight_gradient, plan.weight_gradient)}"


@contextlib.contextmanager
def as_on_a_card() -> Iterator[None]:
    """Take the engines of a Hopper card and the Triton kernels of distillation on the CPU: through
    Triton's interpreter, in small tiles and float32, as the tests do."""
    import pytest

    from tests.ops.linear_cross_entropy.on_exponentials import put_everywhere

    with pytest.MonkeyPatch.context() as patch:
        put_everywhere("cpu", patch)
        for module in ("lowtide.ops.distillation.planner", "lowtide.ops.distillation.autograd"):
            patch.setattr(import_module(module), "choose_backend", lambda *arguments: "triton")
        yield


def quicken_interpreter() -> None:
    """Make Triton's interpreter three times as fast, with the same results."""
    from tests.support.interpreter import leave_out_what_has_no_effect

    leave_out_what_has_no_effect()
