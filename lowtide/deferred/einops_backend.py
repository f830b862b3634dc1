"""Let einops take deferred logits, which it would not know: it looks at the class of a tensor."""

import functools
import sys
from typing import Any

from lowtide.deferred.proxies.logits import DeferredLogits


def register() -> None:
    """Register deferred logits with einops, if the program has imported it."""
    torchs = getattr(sys.modules.get("einops._backends"), "TorchBackend", None)
    if torchs is not None:
        _backend(torchs)


@functools.cache  # einops finds the subclasses of its backends, and Python holds these weakly.
def _backend(torchs: Any) -> type:
    """Return a backend that computes as that of torch does."""

    class DeferredLogitsBackend(torchs):  # type: ignore[misc]
        framework_name = "lowtide.deferred"

        def is_appropriate_type(self, tensor: Any) -> bool:
            return isinstance(tensor, DeferredLogits)

    return DeferredLogitsBackend
