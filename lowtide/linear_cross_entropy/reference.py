"""The dense oracle: the definition of the loss in a few differentiable lines. It holds all logits, on
purpose.

Shapes: N tokens, D features, V classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [V, D]
    target: Tensor,  # [...]
    *,
    linear_bias: Tensor | None,  # [V]
    weight: Tensor | None,  # [V]
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    dtype = torch.promote_types(input.dtype, torch.float32)  # float64 stays float64

    def exact(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    with torch.autocast(input.device.type, enabled=False):
        logits_NV = F.linear(
            input.flatten(0, -2).to(dtype) if input.dim() > 1 else input[None].to(dtype),
            linear_weight.to(dtype),
            exact(linear_bias),
        )
        loss = F.cross_entropy(
            logits_NV,
            target.flatten().long(),
            weight=exact(weight),
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
    return loss.view(target.shape) if reduction == "none" else loss
