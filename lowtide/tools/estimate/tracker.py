"""Track the bytes that are held, and their peak, from the making of each storage to its end.

torch's own MemTracker does the same by module. It cannot tell logits from other activations, and
knows only its own categories (decision 0029).
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.core.collectives import part_of_rank

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS = "activations", "logits"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS)

# Operators of FSDP2 whose arguments are weights to gather, or gradients to reduce.
OF_FSDP = {
    "fsdp::all_gather_copy_in": WEIGHTS,
    "fsdp::split_with_sizes_copy": WEIGHTS,
    "fsdp::chunk_cat": GRADIENTS,
}

GRAIN = 512  # The unit in which CUDA's caching allocator counts.


class Tracker(TorchDispatchMode):
    """Track bytes by category in `held` and `peak` while active; `when` is the phase of the peak.

    A new storage with the shape of a weight counts as a gradient, or, if its dtype is shorter, as
    autocast's copy of the weight. Any other storage counts as logits if one of its dimensions is
    the number of classes, and else as an activation. Temporaries count by their shape.
    """

    def __init__(self, module: nn.Module, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.matrices = {
            shape: each.dtype.itemsize
            for each in module.parameters()
            for shape in (each.shape, part_of_rank(each).shape)
            if each.dim() > 1
        }
        self.phase, self.when = "", ""
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict(self.held)
        self._known = WeakIdKeyDictionary()  # For each storage: [category, bytes].
        for tensor in (*module.parameters(), *module.buffers()):
            self.put(tensor, WEIGHTS)
        for parameter in (each for each in module.parameters() if each.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda tensor: self.put(tensor.grad, GRADIENTS))

    def put(self, tensor: Tensor, category: str) -> None:
        """Assign the tensor's storage to this category from now on, whatever it was before."""
        storage = part_of_rank(tensor).untyped_storage()
        entry = self._known.get(storage)
        if entry is None:
            entry = self._known[storage] = [category, _bytes(storage)]
            weakref.finalize(storage, self._free, entry).atexit = False
        else:
            self.held[entry[0]] -= entry[1]
            entry[0] = category
        self.held[category] += entry[1]

    def forget_peak(self) -> None:
        self.peak = dict(self.held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented  # the DTensor calls operators on its local tensors, which come here
        results = func(*args, **kwargs or {})
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and not each.is_meta and each.untyped_storage() not in self._known:
                self.put(each, self._category(each))
        for each in tree_leaves((args, kwargs) if func.name() in OF_FSDP else ()):
            if isinstance(each, Tensor):
                self.put(each, OF_FSDP[func.name()])
        self._compare()
        return results

    def __enter__(self) -> "Tracker":
        # FSDP2 frees a gathered weight by resizing its storage, which is not an operator.
        self._resize, tracker = torch.UntypedStorage.resize_, self

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = tracker._resize(storage, size)
            if (entry := tracker._known.get(storage)) is not None:
                tracker.held[entry[0]] += _bytes(storage) - entry[1]
                entry[1] = _bytes(storage)
                tracker._compare()
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def _compare(self) -> None:
        """Keep the bytes that are held now if they are the most so far."""
        if sum(self.held.values()) > sum(self.peak.values()):
            self.peak, self.when = dict(self.held), self.phase

    def _free(self, entry: list) -> None:
        category, size = entry
        self.held[category] -= size

    def _category(self, tensor: Tensor) -> str:
        size = self.matrices.get(tensor.shape)
        if size is not None:
            return WEIGHTS if tensor.dtype.itemsize < size else GRADIENTS
        return LOGITS if self.classes in tensor.shape else ACTIVATIONS


def _bytes(storage: torch.UntypedStorage) -> int:
    return -(-storage.nbytes() // GRAIN) * GRAIN
