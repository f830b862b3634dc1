"""Keep the classes of a head divided over the data-parallel ranks.

Shapes: [...] are the rows, D features, V classes.
"""

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.deferred.locate_head import locate_head
from lowtide.ops.linear_cross_entropy.data_sharded import gathered, mark
from lowtide.ops.linear_cross_entropy.definition.vocab_shard import classes_of_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_head(model: nn.Module, mesh: "DeviceMesh", *, head: nn.Module | None = None) -> set[nn.Parameter]:
    r"""Divide the head's classes over data-parallel ranks for good, and return its parameters.

    Example::

        mesh = init_device_mesh("cuda", (8,))
        own = lowtide.shard_head(model, mesh)
        fully_shard(model, mesh=mesh, ignored_params=own)
        loss = lowtide.linear_cross_entropy(model(tokens), model.lm_head.weight, labels)

    FSDP2 gathers a head before its product and reduces its gradient after its backward. With this
    function each of the P ranks keeps its V / P classes: a loss gathers the ranks' tokens, chunk by
    chunk, and reduce-scatters the gradient of hidden states. The gathered weight, its gradient and
    its float32 sum exist on no rank.

    Parameters stay what they are under FSDP2: DTensors with placement Shard(0), of the same names,
    sizes and shards. So optimizers, `clip_grad_norm_`, state dicts and torch.distributed.checkpoint
    see no difference where fully_shard gets the same mesh. Gradients are averaged over the ranks,
    as FSDP2 averages them.

    These take the head: :func:`lowtide.linear_cross_entropy`, :func:`lowtide.linear_log_probs`,
    :class:`lowtide.LinearCrossEntropyLoss`, the divergences of `lowtide.distillation` and
    :func:`lowtide.defer_logits`, if called after this function. A loss has the same value on all
    ranks, the mean of the ranks' losses. `"mean"` is the mean over all ranks' tokens, and so is the
    sum over a `normalizer` of :func:`lowtide.tokens_per_rank`. For ``reduction="none"`` and
    log-probabilities each rank has the rows of its own tokens.

    Args:
        model: any module, before fully_shard.
        mesh: the device mesh of one dimension that fully_shard gets: all ranks have tokens of their
            own. Where fully_shard replicates over a second dimension (HSDP), pass both as one,
            ``mesh._flatten("dp")``.
        head: the :class:`torch.nn.Linear` to divide; None finds it as `defer_logits` does.

    Returns:
        The head's parameters, for `ignored_params` of fully_shard on each unit around the head.

    Real logits: in eval mode, and where an operation needs real logits, the head's forward gathers
    the weight. So all ranks have to call the head equally often.

    Communication, for N tokens of all ranks: N D numbers gathered and N D reduce-scattered in the
    input's dtype; with FSDP2, V D numbers each. FSDP2 moves less from about 1.5 V tokens on.

    Memory: that of :func:`lowtide.linear_cross_entropy` for V / P classes; V D / P numbers each for
    weight and gradient.

    Raises:
        ValueError, TypeError: for a head that is not a :class:`torch.nn.Linear`, tied with another
            module's parameter, or sharded already; for a mesh of several dimensions; in a forward,
            for a mesh that lacks ranks over which FSDP2 averages the gradients of a unit around the
            head. Each is also a RuntimeError.

    Source: Partial FC (arxiv.org/abs/2010.05222) divides the classes of a face recogniser in this
    way.
    """
    _check_mesh(mesh)
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    head = locate_head(model) if head is None else head
    _check_head(model, head)
    mark(mesh)  # A copy of a parameter has no mark of its own, but lies on the same mesh.
    for name, parameter in list(head.named_parameters(recurse=False)):
        setattr(head, name, _divided(parameter, mesh))
    head.__class__ = ShardedLinear
    return set(head.parameters())


class ShardedLinear(nn.Linear):
    """Gather the weight for real logits; deferred logits are a product with the shards."""

    def __getattr__(self, name: str) -> Any:
        """Mark the parameters again: a copy, or a state dict loaded by assignment, has new ones."""
        found = super().__getattr__(name)
        if is_dtensor(found):
            mark(found)
        return found

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if isinstance(input, Tensor):
            weight = gathered(weight).to(input.dtype)
            bias = None if bias is None else gathered(bias).to(input.dtype)  # type: ignore[redundant-expr]
        return F.linear(input, weight, bias)


def _divided(parameter: nn.Parameter, mesh: "DeviceMesh") -> nn.Parameter:
    """Return this rank's part of a parameter as a DTensor; nothing is sent."""
    from torch.distributed.tensor import DTensor, Shard

    whole = parameter.detach()
    part = whole[classes_of_rank(mesh, whole.shape[0])].clone()
    if not part.is_meta:
        part = part.to(mesh.device_type)
    placed: Any = DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    divided = nn.Parameter(placed, requires_grad=parameter.requires_grad)
    mark(divided)
    return divided


def _check_mesh(mesh: Any) -> None:
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise ArgumentTypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; "
            "make one by init_device_mesh(device_type, (ranks,))"
        )
    if mesh.ndim != 1:
        raise ArgumentError(
            f"mesh must have one dimension, of all ranks over which gradients are averaged, got {mesh.ndim}; "
            "flatten those that shard or replicate parameters (mesh._flatten('dp')), and leave out others, "
            "as of tensor parallelism (mesh['dp'])"
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError(
            "mesh must have this process as a member, got a mesh that it is not in; call shard_head on the "
            "ranks of the mesh alone"
        )


def _check_head(model: nn.Module, head: Any) -> None:
    if type(head) is not nn.Linear:
        raise ArgumentTypeError(
            f"head must be a torch.nn.Linear, got {type(head).__name__}; of an adapter pass its base layer, "
            "or leave this head to FSDP2"
        )
    for name, parameter in head.named_parameters():
        if is_dtensor(parameter):
            raise ArgumentError(
                f"the head's {name} is a DTensor already; call shard_head before fully_shard, "
                "tensor parallelism and shard_head itself, and pass what it returns as ignored_params"
            )
    own = {id(parameter) for parameter in head.parameters()}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if module is not head and id(parameter) in own:
                raise ArgumentError(
                    f"the head's weight is also that of {name} ({type(module).__name__}), which needs all "
                    "of its rows on each rank; untie the two (a clone of the weight), or leave the head to "
                    "FSDP2 by fully_shard([embedding, norm, head])"
                )
