"""Check the tensors and options of a call.

Each error message names the argument, what was expected, what came, and what to do.
"""

import inspect
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import Parameter

from lowtide.core.checks import DTYPES, check_choice, check_devices, check_number
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.attention.definition.intervals import Band
from lowtide.ops.attention.definition.masks import ONE_TENSOR, AttentionBias, is_from_torch, window_band
from lowtide.ops.attention.definition.operands import Operands, sizes

Backend = Literal["auto", "sdpa", "triton", "torch", "reference"]


def check_tensors(named: Mapping[str, object]) -> None:
    """Raise unless all are dense, plain tensors."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        _check_memory(name, tensor)


def _check_memory(name: str, tensor: Tensor) -> None:
    """Raise unless the tensor is dense, and torch's functions treat it as a plain one."""
    kind = type(tensor)
    if (kind is Tensor or kind is Parameter) and tensor.layout is torch.strided and not tensor.is_nested:
        return
    if tensor.is_nested:
        raise ArgumentTypeError(
            f"{name} must be a dense tensor, got a nested one; put its sequences one after the other into a "
            "batch of one, with lowtide.attn_bias.BlockDiagonalMask.from_tensor_list(nested.unbind())"
        )
    _check_subclass(name, tensor, kind)
    if tensor.layout is not torch.strided:
        raise ArgumentTypeError(
            f"{name} must be a dense tensor, got one of layout {tensor.layout}; use {name}.to_dense()"
        )


def _check_subclass(name: str, tensor: Tensor, kind: type[Tensor]) -> None:
    """Raise for a subclass whose numbers have a meaning of their own, or are on several ranks."""
    function = kind.__torch_function__
    # Two are accepted: torch's own one for subclasses, which computes as with a plain tensor, and
    # the disabled one, which fake tensors have.
    same = getattr(function, "__func__", None) is Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    if not same and function is not getattr(torch._C, "_disabled_torch_function_impl", None):
        raise ArgumentTypeError(
            f"{name} must be a plain tensor, got {kind.__name__}, which has a meaning of its own to torch's "
            f"functions (__torch_function__); for its numbers pass {name}.as_subclass(torch.Tensor)"
        )
    if hasattr(tensor, "to_local"):
        raise ArgumentTypeError(
            f"{name} must be a plain tensor, got {kind.__name__}; pass {name}.to_local() on each rank, with "
            "batches or heads sharded alike in query, key and value"
        )


def check_bias(name: str, attn_bias: object) -> None:
    """Raise unless the bias is a dense tensor, a mask or None."""
    if attn_bias is None or is_from_torch(attn_bias):
        return
    if isinstance(attn_bias, Tensor):
        _check_memory(name, attn_bias)
        return
    if isinstance(attn_bias, AttentionBias):
        if attn_bias.bias is not None:
            _check_memory(name, attn_bias.bias)
        return
    hint = ""
    if isinstance(attn_bias, type) and issubclass(attn_bias, AttentionBias):
        hint = f"; make one: {attn_bias.__name__}({', '.join(inspect.signature(attn_bias).parameters)})"
    elif isinstance(attn_bias, (list, tuple)):
        hint = f"; add them into one tensor, {ONE_TENSOR}"
    elif type(attn_bias).__name__ == "BlockMask":
        hint = "; call torch's flex_attention with it, or pass what it shows as a bool tensor or such a mask"
    raise ArgumentTypeError(
        f"{name} must be a torch.Tensor, a mask of lowtide.attn_bias or None, "
        f"got {type(attn_bias).__name__}{hint}"
    )


def check_operands(operands: Operands, *, bias_name: str) -> None:
    """Raise unless the dtypes, devices and shapes of operands in [B, H, M, K] fit.

    The messages name the sizes in words, because the caller's tensors may have another layout.
    """
    query, key, value, bias = operands.differentiable
    if query.dtype not in DTYPES:
        raise ArgumentTypeError(f"query must be float32, bfloat16, float16 or float64, got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise ArgumentTypeError(
                f"{name} must have query's dtype ({query.dtype}), got {tensor.dtype}; cast it"
            )
    named = {"query": query, "key": key, "value": value, bias_name: bias}
    check_devices({name: each for name, each in named.items() if each is not None})
    _check_shapes(query, key, value)
    if bias is not None:
        _check_bias_tensor(bias, operands, bias_name)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless query, key and value have sizes that match."""
    B, H, _, K = query.shape
    G = key.shape[1]
    if key.shape[0] != B or value.shape[0] != B:
        raise ArgumentError(
            f"query, key and value must have the same number of batches, got {B}, {key.shape[0]} and "
            f"{value.shape[0]}"
        )
    if key.shape[3] != K:
        raise ArgumentError(f"key must have query's {K} features, got {key.shape[3]}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ArgumentError(
            f"value must have as many heads and keys as key ({G} and {key.shape[2]}), "
            f"got {value.shape[1]} and {value.shape[2]}"
        )
    if (G == 0) != (H == 0) or (G and H % G):
        raise ArgumentError(f"query's heads must be a multiple of key's, got {H} and {G}")


def _check_bias_tensor(bias: Tensor, operands: Operands, name: str) -> None:
    """Raise unless the bias broadcasts to the scores and has a dtype that is supported."""
    if bias.dtype != torch.bool and bias.dtype not in DTYPES:
        raise ArgumentTypeError(
            f"{name} must be bool (True takes part) or floating-point (added), got {bias.dtype}; "
            f"use {name}.bool() or {name}.float()"
        )
    B, H, _, M, N, _, _ = sizes(operands)
    # Dynamo compares symbols by `==`, but not within `in`.
    if not all(given == 1 or given == size for given, size in zip(bias.shape, (B, H, M, N))):
        raise ArgumentError(
            f"{name} must broadcast to {B} batches, {H} heads, {M} queries and {N} keys, "
            f"got {list(bias.shape)}"
        )


def check_backend(backend: object) -> None:
    check_choice("backend", backend, get_args(Backend))


def check_numbers(p: object, scale: object, softcap: object, *, p_name: str = "p") -> None:
    """Raise unless dropout's rate, the scale and the soft cap are numbers in their ranges."""
    _check_number(p_name, p)
    if not 0 <= p <= 1:  # type: ignore[operator]
        raise ArgumentError(f"{p_name} must be in [0, 1], got {p}")
    if scale is not None:
        _check_number("scale", scale)
        if not -float("inf") < scale < float("inf"):  # type: ignore[operator]
            raise ArgumentError(f"scale must be finite, got {scale}")
    if softcap is not None:
        _check_number("softcap", softcap)
        if not 0 < softcap < float("inf"):  # type: ignore[operator]
            raise ArgumentError(f"softcap must be a finite number above 0, or None for none, got {softcap}")


def _check_number(name: str, value: object) -> None:
    """Raise unless the value is a number, or one that torch.compile does not know yet."""
    if isinstance(value, Tensor):
        raise ArgumentTypeError(
            f"{name} must be a float, got a tensor; multiply query with it, or use .item()"
        )
    if not isinstance(value, (torch.SymFloat, torch.SymInt)):
        check_number(name, value)


def check_window(window: object) -> Band | None:
    """Return the band of a window, or raise if the window is not valid."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentTypeError(f"window must be (left, right) or None, got {window!r}")
    return window_band((window[0], window[1]))


def check_seed(seed: object, generator: object) -> None:
    """Raise if both seed and generator are given, or the given one has a wrong type or value."""
    if seed is not None and generator is not None:
        raise ArgumentError("seed and generator cannot both be given; a generator draws a seed")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ArgumentTypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if isinstance(seed, Tensor):
        if seed.dim() != 0 or seed.dtype != torch.int64:
            raise ArgumentError(
                f"seed must be an int or a 0-d int64 tensor, got {list(seed.shape)}, {seed.dtype}"
            )
    elif seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ArgumentTypeError(f"seed must be an int or a 0-d int64 tensor, got {seed!r}")
    elif seed is not None and not -(1 << 63) <= seed < 1 << 63:
        raise ArgumentError(f"seed must be a 64-bit integer, got {seed}")
