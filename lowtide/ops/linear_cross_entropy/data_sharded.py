"""Let the public functions take a head whose classes are divided over the data-parallel ranks.

`lowtide.shard_head` makes such a head, which is called data-sharded here. Its parameters are
DTensors with placement Shard(0), as FSDP2 has them, but they are never gathered. The call becomes a
call for a sharded head with `tokens_sharded`: the operator gathers the hidden states of all ranks
chunk by chunk, and reduce-scatters their gradients.

Gradients are averaged as FSDP2 averages them. The head's parameters get the gradient of the mean of
the ranks' losses. Hidden states get the gradient of their own rank's loss; FSDP2 averages the
gradients of the model's other parameters over the ranks later.

Shapes: V classes, of which V_r are this rank's; N tokens of this rank; P ranks.
"""

import functools
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowtide.core.checks import check_tensors
from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError
from lowtide.core.fsdp import MARK, is_parameter, refuse_other_replicas, reshaped
from lowtide.core.torch_private import never_compiled
from lowtide.ops.linear_cross_entropy.definition.vocab_shard import classes_of_rank
from lowtide.ops.linear_cross_entropy.ranks.agreement import agree_on_gradient
from lowtide.ops.linear_cross_entropy.sharding import telling_errors

Function = TypeVar("Function", bound=Callable[..., Any])


def mark(placed: Any) -> None:
    """Mark a sharded parameter or a mesh as one whose ranks have tokens of their own."""
    setattr(placed, MARK, True)


def is_data_sharded(tensor: Any) -> bool:
    return getattr(tensor, MARK, False) is True


def marked_as(tensor: Tensor, copy: Tensor) -> Tensor:
    """Return the copy, marked if the tensor is."""
    if is_data_sharded(tensor):
        mark(copy)
    return copy


def by_class(name: str, parameter: Any, logits_shape: tuple[int, ...]) -> Tensor:
    """Return a linear layer's parameter [V d1 ... dK, ...] as [V, d1, ..., dK, ...].

    A divided parameter stays divided, and keeps its mark. Raise unless all ranks have equally many
    whole classes.
    """
    V, *positions = logits_shape
    if is_dtensor(parameter):
        divided = [place for place, each in enumerate(parameter.placements) if each.is_shard(0)]
        ranks = math.prod(parameter.device_mesh.size(place) for place in divided)
        if V % ranks:
            raise ArgumentError(
                f"{name} of a K-dimensional loss must have as many whole classes on each rank, got {V} "
                f"classes of positions {positions} over {ranks} ranks; leave this head to FSDP2, or pass "
                "each rank's own rows and group to lowtide.linear_cross_entropy"
            )
    return marked_as(parameter, reshaped(parameter, logits_shape))


def check_whole(name: str, tensor: Tensor) -> None:
    """Raise for a parameter of a data-sharded head."""
    if is_data_sharded(tensor):
        raise ArgumentError(
            f"{name} belongs to a head of lowtide.shard_head, which each chunk would gather; call "
            "lowtide.linear_cross_entropy or lowtide.linear_log_probs, or leave the head to FSDP2"
        )


def gathered(tensor: Any) -> Tensor:
    """Return the whole of a data-sharded tensor; its gradient is averaged over the ranks.

    All ranks of the mesh have to call it.
    """
    from torch.distributed.tensor import Partial

    refuse_other_replicas(tensor)
    whole: Tensor = tensor.full_tensor(grad_placements=[Partial()])
    return _scale_gradient(whole, tensor.device_mesh.size())


def mean_of_losses(loss: Tensor, mesh: Any) -> Tensor:
    """Return the mean of the ranks' losses; backward passes its gradient on to this rank's loss."""
    mean: Tensor = _MeanOfOwnLosses.apply(loss, mesh.get_group())
    return mean


def takes_data_sharded_head(function: Function) -> Function:
    """Let a function of (input, linear_weight, target, **options) take a data-sharded head.

    If it returns results of each row, each rank gets those of its own tokens. A function that has a
    `reduction` returns the mean of the ranks' losses.
    """
    reduces = "reduction" in inspect.signature(function).parameters

    @functools.wraps(function)
    def run(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Any:
        if not is_data_sharded(linear_weight):
            check_mark(input, linear_weight)
            return function(input, linear_weight, target, **options)
        reduction = options.get("reduction", "mean") if reduces else "none"
        result, group = _of_own_classes(function, input, linear_weight, target, options)
        if reduction == "none":
            return result
        of_all_tokens = reduction == "mean" and options.get("normalizer") is None
        return mean_over_ranks(result, group, of_all_tokens=of_all_tokens)

    return run  # type: ignore[return-value]


def check_mark(input: Any, linear_weight: Any) -> None:
    """Raise for a copy of a data-sharded weight, whose ranks would seem to have the same tokens."""
    # Three cases pass. The placements of a DTensor as input say which tokens each rank has. A
    # parameter belongs to another head on this mesh. A graph cannot read a mesh's attributes.
    if not is_dtensor(linear_weight) or is_dtensor(input):
        return
    if is_parameter(linear_weight) or torch.compiler.is_compiling():
        return
    if getattr(linear_weight.device_mesh, MARK, False):
        raise ArgumentError(
            "linear_weight lies on the mesh of a head of lowtide.shard_head, whose ranks have tokens of "
            "their own, but is no parameter of that head, got a copy; pass head.weight itself, under "
            "torch.no_grad() for no gradient"
        )


def _of_own_classes(
    function: Callable[..., Any], input: Tensor, linear_weight: Any, target: Tensor, options: dict[str, Any]
) -> tuple[Any, Any]:
    """Call the function for this rank's classes; return its result, and the ranks' group."""
    group = linear_weight.device_mesh.get_group()
    bias, weight, scale = (options.get(name) for name in ("linear_bias", "weight", "logit_scale"))
    with telling_errors({"input": input, "linear_weight": linear_weight}, group):
        check_tensors({"input": input, "target": target})
        check_options(linear_weight, options)
    options = options | place_of(linear_weight, options.get("num_classes"))
    if isinstance(bias, Tensor):
        options["linear_bias"] = own_part(bias, input.dtype)
    if isinstance(weight, Tensor):
        options["weight"] = weight[own_classes(linear_weight)]
    if isinstance(scale, Tensor):
        options["logit_scale"] = _scale_gradient(scale, group.size())
    return function(input, own_part(linear_weight, input.dtype), target, **options), group


def own_classes(parameter: Any) -> slice:
    """Return the classes of this rank."""
    return classes_of_rank(parameter.device_mesh, parameter.shape[0])


def place_of(parameter: Any, num_classes: int | None) -> dict[str, Any]:
    """Return the arguments that say how the classes and the tokens are divided over ranks."""
    return {
        "group": parameter.device_mesh.get_group(),
        "first_class": own_classes(parameter).start,
        "num_classes": parameter.shape[0] if num_classes is None else num_classes,
        "tokens_sharded": True,
    }


def own_part(parameter: Any, dtype: torch.dtype) -> Tensor:
    """Return this rank's classes of a parameter, cast to a dtype.

    FSDP2's policy casts the parameters that it gathers in the same way. The gradient is averaged
    over the ranks.
    """
    refuse_other_replicas(parameter)
    return _scale_gradient(parameter.to_local().to(dtype), parameter.device_mesh.size())


@never_compiled("a loss of lowtide.shard_head compares the ranks' gradients in backward: leave out fullgraph")
def mean_over_ranks(result: Tensor, group: Any, *, of_all_tokens: bool) -> Tensor:
    """Return the mean of the ranks' losses.

    `result` is the loss of the tokens of all ranks. If it is a mean (`of_all_tokens`), it is also
    the mean of the ranks' losses. If it is a sum, it is divided by the number of ranks.
    """
    mean: Tensor = _MeanOfLosses.apply(result if of_all_tokens else result / group.size(), group)
    return mean


def check_options(linear_weight: Tensor, options: dict[str, Any]) -> None:
    """Raise for options that do not fit a head of lowtide.shard_head."""
    for name in ("group", "first_class"):
        if options.get(name) is not None:
            raise ArgumentError(
                f"{name} must be left out with a head of lowtide.shard_head, whose mesh says it, "
                f"got {options[name]}"
            )
    bias, weight = options.get("linear_bias"), options.get("weight")
    if isinstance(bias, Tensor) and not is_data_sharded(bias):
        raise ArgumentError(
            "linear_bias must be that of the same head of lowtide.shard_head as linear_weight, got "
            f"another {type(bias).__name__}; pass the head's own"
        )
    V = linear_weight.shape[0]
    if isinstance(weight, Tensor) and weight.shape != (V,):
        raise ArgumentError(
            f"weight must hold a number for each of the head's {V} classes, on all ranks the same, "
            f"got shape {list(weight.shape)}"
        )


def _scale_gradient(tensor: Tensor, ranks: int) -> Tensor:
    scaled: Tensor = _AveragedGradient.apply(tensor, ranks)
    return scaled


class _AveragedGradient(torch.autograd.Function):
    """Divide a gradient, which is a sum over the ranks, by the number of ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient / ctx.ranks, None


class _MeanOfOwnLosses(torch.autograd.Function):
    """Average the ranks' losses; backward passes the gradient on, because it is averaged later."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: Any) -> Tensor:
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total / group.size()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


# The number of each group's next loss. All ranks make the same calls, so they count alike. A name
# may also be that of a group that has been destroyed, and had other ranks.
_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


class _MeanOfLosses(torch.autograd.Function):
    """Return the mean of the ranks' losses; backward multiplies by the number of ranks.

    So hidden states get the gradient of their own rank's loss. For the head's parameters
    `_AveragedGradient` divides by the number of ranks again.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.number = group, next(_numbers.setdefault(group, itertools.count()))
        return mean.clone()  # not a view: if an FSDP2 unit returned one, `loss += ...` would lose its hooks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Multiply the gradient, if all ranks have the same one for the same loss.

        Each rank computes its classes of dW from the tokens of all ranks, so all ranks must scale
        the loss alike.
        """
        gradient = agree_on_gradient(ctx.group.group_name, ctx.number, gradient)
        return gradient * ctx.group.size(), None
