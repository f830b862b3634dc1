"""The collectives that a call starts, by kind and bytes."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from lowtide.core import collectives
from tests.support.rehearsals import in_rehearsal


@contextlib.contextmanager
def counted() -> Any:
    """The kind and the bytes of each collective, in order, without fingerprints of cards' tensors.

    tests/distributed/test_doctor.py counts these too.
    """
    found: list[tuple[str, int]] = []
    own = collectives.Group
    real = {name: getattr(own, name) for name in ("gather", "sum_", "scatter_sum")}

    def recording(name: str) -> Any:
        def record(self: Any, tensor: Tensor) -> Any:
            if not in_rehearsal() and (tensor.dtype != torch.long or tensor.numel() > 4):
                found.append((name, tensor.numel() * tensor.element_size()))
            return real[name](self, tensor)

        return record

    for name in real:
        setattr(own, name, recording(name))
    try:
        yield found
    finally:
        for name, function in real.items():
            setattr(own, name, function)
