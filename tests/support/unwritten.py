"""Memory that nobody has written to is full of NaN (integers: their largest), so reads show."""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo


def poison(replace: Callable[[Any, str, Any], None]) -> None:
    """Replaces torch's functions that make such memory, by `replace(owner, name, function)`."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            with torch.no_grad():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
                elif tensor.dtype not in (torch.bool, torch.complex64, torch.complex128):
                    tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return wrapper

    # Dynamo's table of torch's functions, which a process group drops: it has to be made of torch's
    # own.
    table = torch._dynamo.trace_rules.get_torch_obj_rule_map
    if torch.empty not in table():
        table.cache_clear()
        table()
    # And so does the table of those that `with torch.device(...)` gives a device, which is made
    # once.
    with torch.device("meta"):
        torch.empty(0)
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        replace(owner, name, poisoned(getattr(owner, name)))
