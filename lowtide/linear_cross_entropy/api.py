"""The public entry points of the fused head and loss. The docstring of `linear_cross_entropy` is the
contract."""

from typing import Any

import torch
from torch import Tensor, nn

from lowtide.linear_cross_entropy import ops, reference
from lowtide.linear_cross_entropy.check import check_arguments, check_transforms
from lowtide.linear_cross_entropy.plan import Reduction, make_plan


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    workspace: int | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""`cross_entropy(linear(input, linear_weight, linear_bias), target)` without the logits.

    With :math:`z_i = W x_i + b`, :math:`w` the class weights, :math:`\epsilon` the label smoothing and
    :math:`t_i` the target of row i, the loss of a row is

    .. math::
        \ell_i = (1-\epsilon)\, w_{t_i} \bigl(\mathrm{lse}(z_i) - z_{i t_i}\bigr)
                 + \frac{\epsilon}{V} \sum_v w_v \bigl(\mathrm{lse}(z_i) - z_{iv}\bigr),

    0 where :math:`t_i` is `ignore_index`. `"sum"` adds the rows up, `"mean"` divides that by the
    :math:`w_{t_i}` of the rows that count, as :func:`torch.nn.functional.cross_entropy` does; with all rows
    ignored the mean is NaN and its gradients are zero, as there.

    Shapes:
        input [..., D], linear_weight [V, D], target [...], linear_bias [V], weight [V]; the result is 0-d,
        or [...] for ``reduction="none"``. Any strides; a shifted slice such as ``hidden[:, :-1]`` is not
        copied as a whole.

    Args:
        target: class indices, int64 or int32. An index outside [0, V) that is not `ignore_index` is an
            IndexError on the CPU; on CUDA, where looking would mean waiting, it makes the loss and the
            gradients that it reaches NaN.
        weight: class weights; they take no gradient.
        ignore_index: rows with this target count for nothing; None means -100.
        label_smoothing: in [0, 1].
        workspace: bytes that the call may hold beyond inputs, the loss and the gradients. None is 64 MiB on
            the CPU; on CUDA 1 GiB, and the float32 sum of a half-precision weight's gradient on top (4 V D
            bytes). A smaller one costs time, never exactness. On CUDA under autocast, a weight of another
            dtype is cast as a whole once, like autocast's own copy, and cuBLAS has its own workspace;
            neither is counted.
        backend: `"auto"` runs `"triton"` for CUDA tensors up to float32 where Triton is installed, else
            `"torch"`. `"reference"` is the plain definition, which holds all logits whatever the workspace
            and differentiates to any order.

    Precision:
        Products take their operands in the input's dtype (autocast's under autocast; float32 for half
        precision on the CPU) and are summed in float32, as are the logits, the statistics and the gradient
        of the weight; float64 stays float64. Each gradient is rounded once, for mean and sum twice if the
        upstream gradient is no power of two. The loss is float32 for half-precision input: a bfloat16 loss
        has three digits.

    Memory:
        O(workspace), never N V: a chunk of tokens at a time. For mean and sum the gradients are formed in
        forward (three products) and held until backward; for none, backward recomputes the logits (four
        products). Where the float32 sum of a half-precision weight's gradient does not fit the workspace,
        that gradient is formed class block by class block, for one more product.

    NaN and infinities reach the loss as in torch. A NaN in an ignored row reaches no loss; whether it reaches
    gradients depends on the backend (in plain torch it does).

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices and options that do not fit, or a workspace below
            one row.
        IndexError: see `target`.
        NotImplementedError: for derivatives of higher order and the transforms of torch.func.

    Source: pytorch issue 124480; the chunk loop is that of github.com/mgmalek/efficient_cross_entropy.

    Example::

        loss = lowtide.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, tokens[:, 1:])
        loss.backward()
    """
    ignore_index = -100 if ignore_index is None else ignore_index
    check_arguments(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction,
        ignore_index,
        label_smoothing,
        workspace,
        backend,
    )
    if backend == "reference":
        return reference.linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    return _planned(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        workspace=workspace,
        backend=backend,
    )


@torch.compiler.disable(
    reason="lowtide.linear_cross_entropy runs eagerly; use backend='reference' inside a graph"
)
def _planned(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    **options: Any,
) -> Tensor:
    check_transforms(input)
    plan = make_plan(input, linear_weight, linear_bias, weighted=weight is not None, **options)
    return ops.linear_cross_entropy(input, linear_weight, target, linear_bias, weight, plan)


class LinearCrossEntropyLoss(nn.Module):
    """:func:`linear_cross_entropy` as a module that owns the head: `.linear`, a :class:`torch.nn.Linear`.

    Args:
        in_features, num_classes, bias, device, dtype: of `.linear`.
        weight: class weights [V], kept as a buffer.
        The others are those of :func:`linear_cross_entropy`.

    Example::

        criterion = lowtide.LinearCrossEntropyLoss(4096, 128256, device="cuda", dtype=torch.bfloat16)
        loss = criterion(hidden, target)            # hidden [..., 4096], target [...]
        criterion.linear.weight = embedding.weight  # a tied head
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        workspace: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "workspace": workspace,
            "backend": backend,
        }

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)
