"""Imitate a CUDA device for fake tensors on the CPU.

A build of torch without CUDA has no autograd for tensors of that device, fake or not.

CUDA's kernels save and return other tensors than the CPU's. So `Functions` calls the operators of
CUDA's kernels instead of the CPU's. `OperatorMemory` adds the memory that an operator holds inside
while it runs.

Shapes: B sequences, H heads, M queries, N keys, K features of a head; V classes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lowtide.ops.linear_cross_entropy.operator.fake import moved_call

aten = torch.ops.aten


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute FlashAttention where it supports the call, else the memory-efficient kernel.

    Both keep the output and a number per query.
    """
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.shape[-1] == value.shape[-1] <= 256:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, 0)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rstd = input.new_empty(input.shape[:-dims], dtype=torch.float32)
        ctx.save_for_backward(input, weight, rstd)
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


def rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _RMSNorm.apply(input, weight, len(normalized_shape))


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


# CUDA's autocast runs these in float32; the CPU's keeps their dtype.
FLOAT32 = {
    *(F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax),
    *(F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.cross_entropy, F.nll_loss),
    *(torch.pow, Tensor.pow, torch.rsqrt, Tensor.rsqrt, torch.exp, Tensor.exp, F.softplus),
}

KERNELS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.dropout: dropout,
}


class Functions(TorchFunctionMode):
    """Call the operators of CUDA's kernels in place of the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in KERNELS:
            return KERNELS[func](*args, **kwargs)
        if func in FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, _float32, (args, kwargs))
        return func(*args, **kwargs)


def _grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a tensor for the product of each group, of any dtype as in torch's kernels.

    torch's own function for fake tensors refuses all dtypes but bfloat16.
    """
    groups = () if left.dim() != right.dim() else left.shape[:1] if offs is None else offs.shape
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype)


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


class OperatorMemory(TorchDispatchMode):
    """Add the memory that operators hold while they run.

    Enter this mode after the tracker, so that the tracker sees its allocations.
    """

    def __init__(self, classes: int, device: str = "cuda") -> None:
        super().__init__()
        self.classes, self.device = classes, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # the DTensor then calls the operator on its local tensors
        if func.namespace == "lowtide" and (results := self._on_device(func, args)) is not None:
            return results
        if func is aten._local_scalar_dense.default:  # item(): any number will do.
            return 1.0 if args[0].is_floating_point() else 1
        if func.name() == "aten::_grouped_mm":
            return _grouped_product(*args, **kwargs or {})
        if func.name() == "c10d::_reduce_scatter_base_" and self.device == "cpu":
            whole = torch.empty_like(args[1])  # Gloo allocates it: it sums all parts before it takes one.
            results = func(*args, **kwargs or {})
            del whole
            return results
        if func is aten._scaled_dot_product_flash_attention_backward.default:
            _grad, query, key, value = args[:4]
            sums = query.new_empty(query.shape, dtype=torch.float32)  # The sum of dQ.
            heads = torch.Size((*query.shape[:2], *key.shape[2:]))
            expanded = [each.new_empty(heads) for each in (key, value) if each.shape[1] != query.shape[1]]
            results = func(*args, **kwargs or {})
            del sums, expanded
            return results
        return func(*args, **kwargs or {})

    def _on_device(self, func: Any, args: Any) -> list[Tensor] | None:
        """Return results in the device's shapes; hold the loss's workspace while they are made."""
        mode = next(each.fake_mode for each in tree_leaves(args) if isinstance(each, Tensor))
        with _disable_current_modes(), mode:
            call = moved_call(func, args, self._stand_in)
        if call is None:
            return None
        outputs, workspace = call
        held = torch.empty(-(-workspace // self.classes), self.classes, dtype=torch.uint8)
        results = [torch.empty(each.shape, dtype=each.dtype) for each in outputs]
        del held
        return results

    def _stand_in(self, tensor: Tensor) -> Tensor:
        size, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=self.device)
