"""List entries that measure what every option of the loss costs, for `measure.rows`.

An entry is one way to call lowtide. An option consists of arguments, which are added to a call or
replace the benchmark's own. A function among them makes a tensor, once, before anything is timed;
if the tensor requires a gradient, a step computes it.

Legend: N tokens, D features, V classes, R rank of an adapter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide import linear_cross_entropy, linear_log_probs
from lowtide.ops.linear_cross_entropy import dispatch
from lowtide.tools.bench.cases import IGNORE_INDEX, Inputs, LossCase, Mode
from lowtide.tools.bench.providers import PROVIDERS, BenchEntry, TimedCall
from lowtide.tools.eager import eager_loss
from lowtide.tools.units import GIB

RANK = 16
WORKSPACE = 7 * GIB // 2  # Equal to that of the provider lowtide-3.5GiB.

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Option:
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    function: Function = lambda *inputs, **arguments: (linear_cross_entropy(*inputs, **arguments),)
    per_token: int = 0
    """The number of outputs with one number a token, each with an upstream gradient: all, or 0."""
    losses: int = 1
    """The number of the case's losses that it computes."""
    workspace: int | None = None
    """None for the function's default."""
    distribution: str = "lowtide"

    def call(self, case: LossCase, inputs: Inputs) -> TimedCall:
        given = dict(zip(("input", "linear_weight", "target"), inputs))
        made = {
            name: value(case, given) if callable(value) else value for name, value in self.arguments.items()
        }
        if self.workspace is not None:
            made["workspace"] = self.workspace
        arguments = given | made
        main = tuple(arguments.pop(name) for name in given)
        tensors = (each for each in (*main, *arguments.values()) if isinstance(each, Tensor))
        sum_dtype = torch.promote_types(case.dtype, torch.float32)
        upstream = tuple(_random(case, case.tokens, dtype=sum_dtype, seed=k) for k in range(self.per_token))
        return TimedCall(
            partial(self.function, *main, **arguments),
            tuple(tensor for tensor in tensors if tensor.requires_grad),
            upstream or None,
            self.losses,
        )


# Tensors that options consist of.


def _random(case: LossCase, *size: int, dtype: torch.dtype | None = None, seed: int = 10) -> Tensor:
    generator = torch.Generator(case.device).manual_seed(1 + seed)
    return torch.randn(*size, dtype=dtype or case.dtype, device=case.device, generator=generator)


def _bias(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    return _random(case, case.classes).requires_grad_()


def _class_weight(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    return _random(case, case.classes, dtype=torch.float32).abs_()


def _row_weight(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    return _random(case, case.tokens, dtype=torch.float32).abs_()


def _learned_scale(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    return torch.full((), 0.5, device=case.device).requires_grad_()


def _probabilities(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    """Return class probabilities, in place: there may be room for one [N, V] and not for two."""
    target_NV = _random(case, case.tokens, case.classes).abs_()
    return target_NV.div_(target_NV.sum(1, keepdim=True))


def _two_heads(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    weight_VD = given["linear_weight"].detach()
    return torch.stack([weight_VD, weight_VD.flip(0)], 1).requires_grad_()


def _two_targets(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    return torch.stack([given["target"], given["target"].flip(0)], 1)


def _half_ignored(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    order_N = _random(case, case.tokens, dtype=torch.float32)
    return given["target"].index_fill(0, order_N.topk(case.tokens // 2).indices, IGNORE_INDEX)


def _frozen(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    return given["linear_weight"].detach()


def _down(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    return _random(case, RANK, case.features).mul_(case.features**-0.5).requires_grad_()


def _up(case: LossCase, given: dict[str, Tensor]) -> Tensor:
    return _random(case, case.classes, RANK).mul_(RANK**-0.5).requires_grad_()


# Functions of input, weight and target, besides the plain one.


def _lora(
    input_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, down_RD: Tensor, up_VR: Tensor, **arguments: Any
) -> tuple[Tensor, ...]:
    terms = (input_ND, input_ND @ down_RD.T), (weight_VD, up_VR)
    return (dispatch.cross_entropy(*terms, target_N, **arguments),)


def _one_position(
    input_ND: Tensor, weight_VD: Tensor, target_N: Tensor, **arguments: Any
) -> tuple[Tensor, ...]:
    return (linear_cross_entropy(input_ND, weight_VD[:, None], target_N[:, None], **arguments),)


def _log_probs(*names: str) -> Function:
    def function(*inputs: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        found = linear_log_probs(*inputs, **arguments)
        return tuple(getattr(found, name) for name in names)

    return function


def _eager(*inputs: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    return (eager_loss(*inputs, **arguments),)


NONE = {"reduction": "none"}
LORA = {"down_RD": _down, "up_VR": _up}
VALUES = ("log_prob", "entropy", "logsumexp")
_step = partial(Option, workspace=WORKSPACE)

OPTIONS: dict[Mode, tuple[BenchEntry, ...]] = {
    Mode.STEP: (
        _step("plain"),
        _step("bias", {"linear_bias": _bias}),
        _step("class-weight", {"weight": _class_weight}),
        _step("label-smoothing", {"label_smoothing": 0.1}),
        _step("label-smoothing-class-weight", {"label_smoothing": 0.1, "weight": _class_weight}),
        _step("softcap", {"softcap": 30.0}),
        _step("logit-scale", {"logit_scale": 0.5}),
        _step("logit-scale-learned", {"logit_scale": _learned_scale}),
        _step("z-loss", {"z_loss": 1e-4}),
        _step("row-weight", {"row_weight": _row_weight}),
        _step("probabilities", {"target": _probabilities}),
        _step("ignore-index", {"ignore_index": 0}),
        _step("half-ignored", {"target": _half_ignored}),
        _step("k-dimensional", {}, _one_position),
        _step("k-dimensional-2", {"linear_weight": _two_heads, "target": _two_targets}, losses=2),
        _step(
            "combined",
            {
                "linear_bias": _bias,
                "weight": _class_weight,
                "softcap": 30.0,
                "logit_scale": _learned_scale,
                "z_loss": 1e-4,
            },
        ),
        _step(f"lora-{RANK}", LORA, _lora),
        # A frozen weight saves one of the floor's three products; compare these two with each
        # other.
        _step("frozen-weight", {"linear_weight": _frozen}),
        _step(f"frozen-weight-lora-{RANK}", {"linear_weight": _frozen} | LORA, _lora),
        _step("none", NONE, per_token=1),
        _step("log-prob", {}, _log_probs("log_prob"), per_token=1),
        _step("entropy", {}, _log_probs("entropy"), per_token=1),
        _step("log-probs", {}, _log_probs(*VALUES), per_token=len(VALUES)),
        Option("eager-none", NONE, _eager, per_token=1, distribution="torch"),
    ),
    Mode.FORWARD: (
        Option("plain"),
        Option("none", NONE),
        Option("log-probs", {}, _log_probs(*VALUES, "argmax")),
        *(provider for provider in PROVIDERS if provider.name in ("eager", "liger", "quack")),
    ),
}


def options(mode: Mode, workspace: int) -> list[BenchEntry]:
    """Return the options of a mode, the plain one first.

    The workspace is for all that have one: the steps of lowtide.
    """
    return [
        replace(option, workspace=workspace) if isinstance(option, Option) and option.workspace else option
        for option in OPTIONS[mode]
    ]
