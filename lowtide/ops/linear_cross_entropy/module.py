"""Define LinearCrossEntropyLoss, a module that owns its head; its docstring is the contract."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.core.checks import check_tensors
from lowtide.core.errors import ArgumentError, ArgumentTypeError, advises
from lowtide.core.fsdp import gathers_head
from lowtide.ops.linear_cross_entropy.api import linear_cross_entropy
from lowtide.ops.linear_cross_entropy.data_sharded import by_class
from lowtide.ops.linear_cross_entropy.definition import advice
from lowtide.ops.linear_cross_entropy.definition.head import Arguments, Backend, Reduction
from lowtide.ops.linear_cross_entropy.definition.validation import check_loss_options


@gathers_head
def _loss_of_positions(
    input: Tensor,
    linear_weight: Tensor,  # [V d1 ... dK, D]
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    logits_shape: tuple[int, ...],
    **options: Any,
) -> Tensor:
    """Compute a K-dimensional loss from a linear layer's parameters.

    Parameters that FSDP2 shards are gathered first, before they are reshaped here.
    """
    weight = by_class("linear_weight", linear_weight, logits_shape)
    bias = None if linear_bias is None else by_class("linear_bias", linear_bias, logits_shape)
    return linear_cross_entropy(input, weight, target, linear_bias=bias, **options)


def _check_product(linear: nn.Module) -> None:
    """Raise unless calling this module is the product with its weight, as the loss computes it.

    The hooks of FSDP2 and of tensor parallelism are allowed: they gather and place tensors, and so
    does the loss.
    """
    has_hooks = linear._forward_pre_hooks or linear._forward_hooks
    has_hooks = has_hooks or linear._backward_pre_hooks or linear._backward_hooks
    if type(linear).forward is nn.Linear.forward and "forward" not in vars(linear) and not has_hooks:
        return
    wrapped = _wrapped(linear)
    for each in wrapped:
        _check_product(each)
    found = None if wrapped else _addition(linear)
    if found is not None:
        raise ArgumentError(
            f".linear must be an nn.Linear, by whose weight this module multiplies, got {found}, which would "
            "be left out. Remove a hook, or put it on the loss module; leave .linear out of PEFT's "
            "target_modules (modules_to_save trains it whole); take torch.nn.utils.parametrizations in place "
            "of hooks that compute a weight. For an adapted head without logits, call lowtide.defer_logits "
            "on a model that calls the head and cross_entropy"
        )


def _wrapped(module: Any) -> list[nn.Module]:
    """Return the modules of which a wrapper calls one, and has the weight of that one."""
    if hasattr(module, "modules_to_save"):  # of PEFT
        return [module.original_module, *module.modules_to_save.values()]
    children = list(module.children())  # torch wraps a module to compile or to checkpoint it
    wraps = len(children) == 1 and type(module).__module__.startswith("torch.") and hasattr(module, "weight")
    return children if wraps and not isinstance(module, nn.Linear) else []


def _addition(linear: nn.Module) -> str | None:
    """Return what computes more than the product when the module is called, or None."""
    forwards = (vars(each).get("forward") for each in type(linear).__mro__)
    # defer_logits and shard_head replace the class by one whose forward is the product as well.
    forward = next(each for each in forwards if each is not None and not _is_of(each, "lowtide."))
    if forward is not nn.Linear.forward:
        return f"a {type(linear).__module__}.{type(linear).__qualname__}"
    own = vars(linear).get("forward")
    # Hooks leave the class's own forward on the instance when they are removed.
    if own is not None and getattr(own, "__func__", None) is not type(linear).forward:
        return "one whose forward is replaced"
    kinds: list[Any] = [linear._forward_pre_hooks, linear._forward_hooks]
    kinds += [linear._backward_pre_hooks, linear._backward_hooks]
    hooks = [hook for each in kinds for hook in each.values() if not _is_of(hook, "torch.distributed.")]
    return f"one with a hook, {getattr(hooks[0], '__qualname__', type(hooks[0]).__name__)}" if hooks else None


def _is_of(function: Any, package: str) -> bool:
    return str(getattr(function, "__module__", "")).startswith(package)


class LinearCrossEntropyLoss(nn.Module):
    """Own the head `.linear` (:class:`torch.nn.Linear`), and compute :func:`linear_cross_entropy`.

    Example::

        criterion = lowtide.LinearCrossEntropyLoss(
            4096, 128256, device="cuda", dtype=torch.bfloat16
        )
        loss = criterion(hidden, target)            # hidden [..., 4096], target [...]
        criterion.linear.weight = embedding.weight  # a tied head

    Args:
        in_features, num_classes, bias, device, dtype: those of `.linear`.
        out_features: (d1, ..., dK) of a K-dimensional loss; `.linear` then has V d1 ... dK outputs.
        weight: class weights [V], kept as a buffer.
        logit_scale: a float. A learned scale is refused: keep it in your own module and call the
            function.

    All other arguments are those of :func:`linear_cross_entropy`. Row weights and the normalizer go
    to the call: ``criterion(hidden, target, row_weight=..., normalizer=...)``.

    For the weight of a head that another module owns (Liger's module takes it in the call), use
    :func:`linear_cross_entropy`.

    The loss multiplies by ``.linear.weight``, and does not call `.linear`. So it is an error if
    calling `.linear` would compute more: an adapter of PEFT, a hook, a class with a forward of its
    own. Weights of `torch.nn.utils.parametrizations` and PEFT's ``modules_to_save`` are supported.

    `parallelize_module` with ``{"linear": ColwiseParallel()}`` divides the classes over ranks.
    """

    weight: Tensor | None

    @advises(advice.INSTEAD_OF, advice.USAGE_OF_MODULE)
    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float | None = None,
        z_loss: float = 0.0,
        workspace: int | None = None,
        backend: Backend = "auto",
        tokens_sharded: bool = False,
        segments: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(logit_scale, Tensor):
            raise ArgumentTypeError(
                "logit_scale must be a float here, got a tensor, which this module would neither train nor "
                "save; keep it in a module of your own and call lowtide.linear_cross_entropy"
            )
        if isinstance(out_features, int):
            raise ArgumentTypeError(
                f"out_features must be a tuple (d1, ..., dK), got {out_features}; of one such dimension pass "
                f"({out_features},), and the classes as num_classes"
            )
        check_tensors({} if weight is None else {"weight": weight})
        if weight is not None and weight.shape != (num_classes,):
            raise ArgumentError(f"weight must have shape [{num_classes}], got {list(weight.shape)}")
        no_target = torch.zeros(0) if ignore_index is None else torch.zeros(0, dtype=torch.long)
        given = Arguments(
            reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss
        )
        check_loss_options(given, no_target)
        outputs = num_classes * math.prod(out_features)
        self.linear = nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)
        self.logits_shape = (num_classes, *out_features)
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "workspace": workspace,
            "backend": backend,
            "tokens_sharded": tokens_sharded,
            "segments": segments,
        }

    if TYPE_CHECKING:  # nn.Module.__call__ returns Any

        def __call__(
            self,
            input: Tensor,
            target: Tensor,
            *,
            row_weight: Tensor | None = None,
            normalizer: float | Tensor | None = None,
        ) -> Tensor: ...

    @advises(advice.INSTEAD_OF_IN_FORWARD, advice.USAGE_OF_FORWARD)
    def forward(
        self,
        input: Tensor,
        target: Tensor,
        *,
        row_weight: Tensor | None = None,
        normalizer: float | Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of input [..., in_features] and target by the head `.linear`.

        `row_weight` and `normalizer` are those of :func:`linear_cross_entropy`.
        """
        linear = self.linear
        _check_product(linear)
        linear_weight, linear_bias = linear.weight, linear.bias
        check_tensors({"input": input})
        if input.dim() > 0 and input.shape[-1] != linear_weight.shape[-1]:
            raise ArgumentError(
                f"input must have shape [..., {linear_weight.shape[-1]}], in_features of this module, "
                f"got {list(input.shape)}"
            )
        given = {"weight": self.weight, "row_weight": row_weight, "normalizer": normalizer, **self.options}
        if len(self.logits_shape) > 1:
            given["logits_shape"] = self.logits_shape
            return _loss_of_positions(input, linear_weight, target, linear_bias=linear_bias, **given)
        return linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, **given)

    def extra_repr(self) -> str:
        said = {
            name: value for name, value in self.options.items() if value is not None and value is not False
        }
        return ", ".join(f"{name}={value!r}" for name, value in said.items())
