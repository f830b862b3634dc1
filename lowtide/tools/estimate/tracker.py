"""Track the bytes that are held, and their peak: every storage from its operator to its end.

torch's own MemTracker does the same by module. It cannot tell logits from other activations, and
knows only its own categories (decision 0029).
"""

import weakref
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ACTIVATIONS, LOGITS = "activations", "logits"
CATEGORIES = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS)

GRAIN = 512  # The unit in which CUDA's caching allocator counts.


class Tracker(TorchDispatchMode):
    """Track bytes by category in `held` and `peak` while active; `when` is the phase of the peak.

    A new storage with the shape of a weight is a gradient, or in a shorter dtype autocast's copy of
    the weight. Any other belongs to the logits if one of its dimensions is the number of classes,
    and else is an activation. Temporaries count by their shape.
    """

    def __init__(self, module: nn.Module, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.matrices = {each.shape: each.dtype.itemsize for each in module.parameters() if each.dim() > 1}
        self.phase, self.when = "", ""
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.peak = dict(self.held)
        self._known = WeakIdKeyDictionary()  # Of a storage: [category, bytes].
        for tensor in (*module.parameters(), *module.buffers()):
            self.put(tensor, WEIGHTS)
        for parameter in (each for each in module.parameters() if each.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda tensor: self.put(tensor.grad, GRADIENTS))

    def put(self, tensor: Tensor, category: str) -> None:
        """Assign the tensor's storage to this category from now on, whatever it was before."""
        storage = tensor.untyped_storage()
        entry = self._known.get(storage)
        if entry is None:
            entry = self._known[storage] = [category, -(-storage.nbytes() // GRAIN) * GRAIN]
            weakref.finalize(storage, self._free, entry).atexit = False
        else:
            self.held[entry[0]] -= entry[1]
            entry[0] = category
        self.held[category] += entry[1]

    def start(self, phase: str) -> None:
        self.phase = phase

    def forget_peak(self) -> None:
        self.peak = dict(self.held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **kwargs or {})
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and not each.is_meta and each.untyped_storage() not in self._known:
                self.put(each, self._category(each))
        if sum(self.held.values()) > sum(self.peak.values()):
            self.peak, self.when = dict(self.held), self.phase
        return results

    def _free(self, entry: list) -> None:
        category, size = entry
        self.held[category] -= size

    def _category(self, tensor: Tensor) -> str:
        size = self.matrices.get(tensor.shape)
        if size is not None:
            return WEIGHTS if tensor.dtype.itemsize < size else GRADIENTS
        return LOGITS if self.classes in tensor.shape else ACTIVATIONS
