"""Stand in for a card's products on a CPU, and compare the loss's operator with its fake."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from lowtide.ops.linear_cross_entropy.definition.head import Labels


def product_of_a_card(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False, scale: float = 1.0) -> None:
    """Write scale a b to out, or add it, with float32 sums of half-precision operands.

    cuBLAS may add up parts of a float16 sum in float16, before it is scaled. So it has to be small
    enough by itself.
    """
    found = a.float() @ b.float()
    assert out.dtype != torch.float16 or found.abs().amax() <= 2**15
    found *= scale
    out.copy_(out + found if add else found)


def check_operator_and_fake(inputs: Any, options: Any) -> None:
    """Assert that the loss's operator and its fake return the same shapes and dtypes."""
    x = inputs.input.detach().flatten(0, -2)
    labels = Labels(inputs.target.flatten())
    call = [[x], [inputs.linear_weight.detach()], None, None, *labels, (True, True, False, False), *options]
    real = torch.ops.lowtide.linear_cross_entropy(*call)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.lowtide.linear_cross_entropy(*tree_map_only(torch.Tensor, mode.from_tensor, call))
    assert [(each.shape, each.dtype) for each in real] == [(each.shape, each.dtype) for each in fake]
