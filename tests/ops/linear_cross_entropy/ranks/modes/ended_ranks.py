"""Scenarios in which a rank ends before the others."""

import itertools
import json
import os
import time
from typing import Any

from torch import Tensor

import lowtide
from lowtide.core import collectives
from tests.ops.linear_cross_entropy.ranks.place import Place, made
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room


def killed(rank: int, collective: str = "") -> None:
    """The last rank ends between two calls, or in a chunk's collective of the second one. The
    others raise, and say after how many seconds.
    """
    place, inputs = Place(), made()
    tokens = place.tokens if collective == "scatter_sum" else slice(None)
    x, w = place.leaf(inputs.input, tokens), place.leaf(inputs.linear_weight, place.classes)
    how = {"group": place.group, "tokens_sharded": tokens != slice(None), "workspace": room(25_000)}
    lowtide.linear_cross_entropy(x, w, inputs.target[tokens], **how).backward()
    begun, last = time.monotonic(), rank == place.ranks - 1
    if last and not collective:
        end({"kind": "killed"})
    if last:
        real, issued = getattr(collectives.Group, collective), itertools.count()

        def ending(self: Any, tensor: Tensor) -> Any:
            # The first gather is the agreement.
            if next(issued) == 1:
                end({"kind": f"killed {collective}"})
            return real(self, tensor)

        setattr(collectives.Group, collective, ending)
    try:
        lowtide.linear_cross_entropy(x, w, inputs.target[tokens], **how).backward()
    except RuntimeError as error:
        kind = f"killed {collective}".strip()
        end({"kind": kind, "error": str(error), "seconds": time.monotonic() - begun})


def end(found: dict[str, Any]) -> None:
    """Print what was found, and end without a barrier, as not all ranks are there."""
    print(json.dumps(found), flush=True)
    os._exit(0)
