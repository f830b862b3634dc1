"""What subjects with a dense definition share: workspaces, upstream gradients, the comparison."""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tests.fuzz.compare import Finding, References, compare, is_argument_error
from tests.fuzz.draw import Draw
from tests.fuzz.ways import Function, Leaves, Upstream, differentiated
from tests.support.budgets import Result


def draw_workspace(draw: Draw) -> int | None:
    """None, or a number of bytes, which may be too small."""
    return draw.pick("workspace", [None, None, None, int(2 ** draw.uniform(8, 21))])


def draw_upstream(draw: Draw, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    kinds = ("one", "one", "random", "random", "zero", "large", "expanded", "small")
    kind = draw.pick("upstream", kinds)
    if kind in ("random", "zero"):
        return draw.normal(shape, dtype, 0.0 if kind == "zero" else 1.0)
    value = {"one": 1.0, "large": -(2.0**10), "expanded": 0.7, "small": 2.0**-7}[kind]
    made = torch.tensor(value, dtype=dtype, device=draw.device).expand(shape)
    return made if kind == "expanded" else made.contiguous()


def with_enough_workspace(function: Callable[[int | None], Result], workspace: int | None) -> Result:
    """Of a workspace that is too small the error names one that is not. (Of an operator: where
    another comes after it, as one without gradients and one with, that may ask for more.)"""
    for _ in range(3):
        try:
            return function(workspace)
        except Exception as error:
            asked = re.search(r"workspace must.*?(\d+) bytes", str(error), re.DOTALL)
            if workspace is None or not is_argument_error(error) or asked is None:
                raise
            if int(asked[1]) <= workspace:
                raise Finding(f"asks for {asked[1]} bytes, and has {workspace}: {error}") from None
            workspace = int(asked[1])
    raise Finding(f"the workspace that the error asks for, {workspace} bytes, is not enough")


def check(
    function: Function,
    leaves: Leaves,
    upstream: Upstream,
    way: str,
    references: References,
    dtypes: Mapping[str, torch.dtype],
    sum_dtype: torch.dtype,
    *,
    rounding: float = 0.0,
    terms: Mapping[str, Tensor] | None = None,
) -> None:
    """The results of `function` in this way, and its gradients, against the references."""
    found = differentiated(function, leaves, upstream, way)
    wanted = found.keys() if way in ("no_grad", "inference_mode") else references.exact.keys()
    names = [name for name in wanted if name in references.exact]
    parts = References(*({name: each[name] for name in names} for each in references))
    compare(found, parts, dtypes, sum_dtype, rounding=rounding, terms=terms)
