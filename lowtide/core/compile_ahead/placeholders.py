"""Run a function of tensors on placeholders without memory, to find out what it would do.

Torch has placeholders too, its fake tensors. Their first operation imports SymPy and Dynamo, which
takes 2 to 3 s.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Both are in bytes. Triton compiles a kernel for pointers that are multiples of the first. The
# second is the widest vector that a kernel chooses to read, 8 numbers of float32.
ALIGNMENT, WIDEST = 16, 32


class Placeholder(Tensor):
    """Stand for a tensor: with its dtype, device and layout, but without memory."""

    meta: Tensor
    """The same tensor on the meta device."""

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> "Placeholder":
        made: Placeholder = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(),
            dtype=meta.dtype, device=device,
        )  # fmt: skip
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} of a tensor without memory, outside a rehearsal")

    def data_ptr(self) -> int:
        """Return an address without memory, as far from a multiple of WIDEST as the tensor's own.

        Views of one tensor get addresses in one block, as real views have.
        """
        block = self.meta.untyped_storage()._cdata
        return int(block * WIDEST + self.meta.data_ptr())


def placeholder_of(tensor: Tensor) -> Placeholder:
    """Return a placeholder of a tensor with memory."""
    offset = tensor.data_ptr() % WIDEST // tensor.element_size()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = torch.empty(offset + max(0, reach) + 1, dtype=tensor.dtype, device="meta")
    return Placeholder(memory.as_strided(tensor.shape, tensor.stride(), offset), tensor.device)


class Operation(NamedTuple):
    """Hold an operation of torch in a rehearsal, and the results that it was given."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: Any


class WithoutMemory(TorchDispatchMode):
    """Answer operations by placeholders of their results, and write nothing."""

    def __init__(self, note: Callable[[Operation], None] | None = None) -> None:
        super().__init__()
        self.note = note

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports Dynamo, to skip what follows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = self._answer(func, args, kwargs)
        if self.note is not None:
            self.note(Operation(func, args, kwargs, results))
        return results

    @staticmethod
    def _answer(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        reads = torch.Tag.data_dependent_output in func.tags or func is torch.ops.aten.nonzero.default
        if func.namespace != "aten" or reads:
            raise NotImplementedError(f"{func} in a rehearsal")
        written = [
            kwargs[each.name] if each.name in kwargs else args[place]
            for place, each in enumerate(func._schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
        ]
        if written:
            return written[0] if len(written) == 1 else tuple(written)
        given = sorted(_tensors_in((args, kwargs)), key=Tensor.dim)
        device = torch.device(kwargs.get("device") or (given[-1].device if given else "cpu"))
        results = _results_on_meta(func, args, kwargs)
        return map_tensors(lambda each: Placeholder(each, device), results)


# The results of these have sizes that no argument has. The arguments are vectors, or a few rows.
OF_OTHER_SIZES = {torch.ops.aten.arange, torch.ops.aten.cat, torch.ops.aten.stack}
# This operator returns a view, and its schema does not say so.
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
# Sizes in place of real ones: unlike each other, and unlike numbers that an operation may add.
SIZES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)


def _results_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an operation as tensors on the meta device.

    torch's kernels for that device are used only for views and new tensors; its other kernels are
    in Python, and import SymPy or Dynamo. Any other operation runs on the CPU instead, on small
    tensors of ones. A small size stands for each size of the arguments, and is replaced by that
    size in the results.
    """
    tensors = _tensors_in((args, kwargs))
    other_sizes = func.overloadpacket in OF_OTHER_SIZES
    is_view = func is UNSAFE_VIEW or any(each.alias_info is not None for each in func._schema.arguments)
    is_new = not tensors or func._schema.name.startswith("aten::new_")
    if (is_view or is_new) and not other_sizes:
        return _run(func, args, kwargs, "meta", _meta_of)
    if func is torch.ops.aten.mm.dtype:  # the CPU has no such operator
        (rows, _), (_, columns), dtype = args[0].shape, args[1].shape, args[2]
        return torch.empty(rows, columns, dtype=dtype, device="meta")
    large = sorted({size for each in tensors for size in each.shape if size > 1})
    small = {size: size if other_sizes else SIZES[place] for place, size in enumerate(large)}
    back = {each: size for size, each in small.items()}

    def shrunk(tensor: Tensor) -> Tensor:
        shape = [small.get(size, size) for size in tensor.shape]
        return _like(tensor, shape, "cpu").fill_(1)

    def grown(result: Tensor) -> Tensor:
        shape = [back.get(size, size) for size in result.shape]
        return _like(result, shape, "meta")

    return map_tensors(grown, _run(func, args, kwargs, "cpu", shrunk))


def _like(tensor: Tensor, shape: Sequence[int], device: str) -> Tensor:
    """Return an empty tensor of this shape, whose dimensions lie in the tensor's order."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    memory = torch.empty([shape[place] for place in order], dtype=tensor.dtype, device=device)
    return memory.permute(sorted(range(tensor.dim()), key=order.__getitem__))


def _run(func: Any, args: Any, kwargs: Any, device: str, stand_in: Callable[[Tensor], Tensor]) -> Any:
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device(device)}
    args, kwargs = map_tensors(stand_in, (args, kwargs))
    return func(*args, **kwargs)


def _meta_of(tensor: Tensor) -> Tensor:
    return tensor.meta if isinstance(tensor, Placeholder) else tensor.to("meta")


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return the values (lists and tuples too) with function(tensor) in place of each tensor."""
    return pytree.tree_map_only(Tensor, function, values)


def _tensors_in(values: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]
