"""Define what deferred logits answer as the tensor would, beside torch's functions.

These are its metadata, its gradient or why it has none, what DTensors have, and copies and readers
of arrays.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.head_call import HeadCall
from lowtide.deferred.proxies.proxy import Proxy, spelled
from lowtide.deferred.recorded import expression

# These are read from a meta tensor of the same shape, dtype and strides.
METADATA = {
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "itemsize", "layout"),
    *("nbytes", "ndim", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"),
}

NO_GRADIENT = (
    "the loss does not go through these logits, so they have no gradient; undo() the deferral to look at it"
)


class TensorAttributes(Proxy):
    """Answer from what was recorded, or from the tensor if it has been materialised."""

    node: expression.Node
    meta: Tensor
    head_call: HeadCall

    __array_priority__ = 1000  # NumPy leaves `number * logits` to this class.

    @property
    def tensor(self) -> Tensor | None:
        """Return the tensor if it has been materialised."""
        raise NotImplementedError

    def real(self, operation: str) -> Tensor:
        """Return the tensor, materialised if need be."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name in METADATA:
            return getattr(self.meta, name)
        if name in ("retain_grad", "register_hook") and self._leaf is None:
            raise RuntimeError(f"{name}: {NO_GRADIENT}")
        return super().__getattr__(name)

    def attribute(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"{name!r}: not an attribute of a tensor")
        if name == "mT" or (name == "T" and self.dim() == 2):
            return self.transpose(-1, -2)
        return getattr(self.real("Tensor.T" if name == "T" else spelled(name)), name)

    @property
    def shape(self) -> torch.Size:
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def device(self) -> torch.device:
        return expression.hidden(self.node).device

    @property
    def requires_grad(self) -> bool:
        return expression.requires_grad(self.node) if self.tensor is None else self.tensor.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def _leaf(self) -> Tensor | None:
        """Return the tensor of detached logits that have been made to require a gradient."""
        is_leaf = self.tensor is not None and self.tensor.requires_grad and self.tensor.is_leaf
        return self.tensor if is_leaf else None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise RuntimeError("the data of deferred logits cannot be exchanged; take logits.materialize() first")

    @property
    def grad(self) -> Any:
        if self._leaf is None:
            raise RuntimeError(f"grad: {NO_GRADIENT}")
        return self._leaf.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._leaf is None:
            raise RuntimeError(f"grad: {NO_GRADIENT}")
        self._leaf.grad = value

    # The hooks of tensor parallelism read these from a DTensor; deferred logits have the classes of
    # all ranks.

    @property
    def device_mesh(self) -> Any:
        return self._of_dtensor("device_mesh", self.head_call.mesh)

    @property
    def placements(self) -> Any:
        return self._of_dtensor("placements", self.head_call.placements)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_: Any) -> Any:
        self._of_dtensor("redistribute", None)
        self.head_call.placements = tuple(placements)
        return self

    def full_tensor(self, **_: Any) -> Any:
        return self._of_dtensor("full_tensor", self)

    def to_local(self, **_: Any) -> Any:
        if not all(each.is_replicate() for each in self.placements):
            raise RuntimeError(
                "to_local() of deferred logits whose classes are divided over ranks: a loss of one rank's "
                "classes is not computed without them. Give the head the output layout Replicate(), or keep "
                "its DTensor (use_local_output=False); else undo() the deferral"
            )
        return self

    def _of_dtensor(self, name: str, value: Any) -> Any:
        if self.head_call.mesh is None:
            raise AttributeError(f"{name!r}: not an attribute of a tensor")
        return value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.real("a copy or a pickle").__reduce_ex__(protocol)

    def __array__(self, dtype: Any = None) -> Any:
        return self.real("numpy").__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._read_by_dlpack().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._read_by_dlpack().__dlpack_device__()

    def _read_by_dlpack(self) -> Tensor:
        if self.requires_grad:
            raise RuntimeError(
                "a reader of arrays (torch.as_tensor, torch.tensor, DLPack) would take these logits without "
                "their gradient; pass logits.materialize(), or logits.detach()"
            )
        return self.real("DLPack")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.detach().clone()


@handles("grad", anywhere=True)
def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse torch.autograd.grad with respect to deferred logits."""
    if any(isinstance(each, TensorAttributes) for each in inputs):
        raise RuntimeError(f"torch.autograd.grad: {NO_GRADIENT}")
    return NotImplemented
