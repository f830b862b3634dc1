"""Saved tensors that come back in another layout, as hooks may bring them: values as before."""

import torch
from torch import Tensor


def contiguous(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    memory = torch.empty(tensor.shape[::-1], dtype=tensor.dtype, device=tensor.device)
    return memory.permute(*reversed(range(tensor.dim()))).copy_(tensor)


def padded(tensor: Tensor) -> Tensor:
    """Rows lie apart."""
    return _within(tensor, [*tensor.shape[:-1], tensor.shape[-1] + 3], slice(0, tensor.shape[-1]))


def spread(tensor: Tensor) -> Tensor:
    """The numbers of a row lie apart."""
    return _within(tensor, [*tensor.shape[:-1], 2 * tensor.shape[-1] + 2], slice(1, 2 * tensor.shape[-1], 2))


def moved(tensor: Tensor) -> Tensor:
    """One number further on, so that nothing is aligned."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view(tensor.shape).copy_(tensor)


def far(tensor: Tensor) -> Tensor:
    """With a stride that is large wherever none is used."""
    strides = [1 << 25 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]
    return tensor.as_strided(tensor.shape, strides)


def _within(tensor: Tensor, shape: list[int], columns: slice) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)[..., columns].copy_(tensor)


LAYOUTS = {each.__name__: each for each in (contiguous, transposed, padded, spread, moved, far)}


class Restored:
    """While it is entered, what is saved comes back in that layout."""

    def __init__(self, layout: str) -> None:
        self.changed = 0
        self.layout = layout

    def __enter__(self) -> "Restored":
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.dim() == 0:
            return moved(tensor[None])[0]
        found = LAYOUTS[self.layout](tensor)
        self.changed += found.stride() != tensor.stride() or found.storage_offset() > 0
        return found
