"""Helpers for the tests of all losses: leaves, dense log-probabilities, budgets for errors.

Shapes: B sequences, T tokens, D features, V classes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.loss import budget, norm

B, T, D, V = 6, 9, 7, 23
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
DRAWS = range(8)  # one number can be right by luck; eight can not

Tensors = dict[str, Tensor]
Loss = Callable[[Tensors, Tensors], Tensor]  # a function of leaves and of constants


def language_leaves() -> Tensors:
    """Return hidden states and a head, whose logits have a standard deviation of 2."""
    return {
        "input": torch.randn(B, T, D),
        "linear_weight": torch.randn(V, D) * 2 / D**0.5,
        "linear_bias": torch.randn(V),
        "logit_scale": torch.tensor(0.8),
    }


def completions() -> Tensor:
    """Return targets [B, T] with prompts and padding; in sequence 2 no token counts."""
    target_BT = torch.randint(V, (B, T))
    for row, (start, stop) in enumerate([(0, T), (0, 0), (2, 5), (3, T), (1, 8), (4, 5)]):
        target_BT[row, :start] = -100
        target_BT[row, stop:] = -100
    return target_BT


def head(leaves: Tensors) -> Tensors:
    return {name: leaves[name] for name in ("linear_bias", "logit_scale")}


def logits(leaves: Tensors) -> Tensor:
    """Return the logits in float32 or wider, as a careful eager implementation computes them."""
    x, w, b, scale = (leaves[n] for n in ("input", "linear_weight", "linear_bias", "logit_scale"))
    dtype = torch.promote_types(x.dtype, torch.float32)
    return scale.to(dtype) * F.linear(x.to(dtype), w.to(dtype), b.to(dtype))


def token_log_probs(leaves: Tensors, target_BT: Tensor) -> Tensor:
    found_BT = logits(leaves).log_softmax(-1).gather(-1, target_BT.clamp(min=0)[..., None])[..., 0]
    return found_BT * (target_BT != -100)


def sums(leaves: Tensors, target_BT: Tensor) -> Tensor:
    return token_log_probs(leaves, target_BT).sum(1)


def means(leaves: Tensors, target_BT: Tensor) -> Tensor:
    """Return the mean log-probability of each sequence that has a token that counts."""
    return sums(leaves, target_BT) / (target_BT != -100).sum(1)


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def leaves_in(leaves: Tensors, dtype: torch.dtype) -> Tensors:
    """Return the leaves in a dtype; the logit scale stays in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    dtypes = {name: wide if name == "logit_scale" else dtype for name in leaves}
    return {name: leaf.detach().to(dtypes[name]).requires_grad_() for name, leaf in leaves.items()}


def differentiate(loss_of: Loss, leaves: Tensors, constants: Tensors) -> Tensors:
    loss = loss_of(leaves, constants)
    return {"loss": loss.detach(), **dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values()))))}


def check_against_eager(
    fused: Loss, dense: Loss, make: Callable[[], tuple[Tensors, Tensors]], dtype: torch.dtype
) -> None:
    """Compare the errors against float64: at most twice those of `dense` in the same dtype.

    In float64 the truth itself errs as much as eager does, so the factor is three."""
    factor = 3.0 if dtype == torch.float64 else 2.0
    sum_dtype = torch.promote_types(dtype, torch.float32)
    found: list[tuple[Tensors, Tensors, Tensors]] = []
    for seed in DRAWS:
        torch.manual_seed(seed)
        leaves, constants = make()
        given = leaves_in(leaves, dtype)
        eager_dtype = torch.float32 if dtype == torch.float64 else dtype
        got = differentiate(fused, given, cast(constants, sum_dtype))
        eager = differentiate(dense, leaves_in(given, eager_dtype), cast(constants, torch.float32))
        exact = differentiate(dense, leaves_in(given, torch.float64), cast(constants, torch.float64))
        assert got["loss"].dtype == sum_dtype
        for name, leaf in given.items():
            assert got[name].dtype == leaf.dtype, name
            assert got[name].shape == leaf.shape, name
        found.append((got, eager, exact))
    for name in found[0][0]:
        got_n, eager_n, exact_n = (
            torch.stack([draw[which][name].double() for draw in found]) for which in range(3)
        )
        assert norm(exact_n) > 0, f"{name}: nothing to compare"
        allowed = budget(eager_n, exact_n, exact_n, factor=factor, dtype=sum_dtype)
        error = norm(got_n - exact_n)
        assert error <= allowed, f"{name}: error {error:.3e} exceeds its budget {allowed:.3e}"


def check_gradients(fused: Loss, make: Callable[[], tuple[Tensors, Tensors]]) -> None:
    """Check gradients against finite differences in float64, along random directions."""
    leaves, constants = make()
    leaves, constants = leaves_in(leaves, torch.float64), cast(constants, torch.float64)
    names = tuple(leaves)
    assert torch.autograd.gradcheck(
        lambda *values: fused(dict(zip(names, values)), constants), tuple(leaves.values()), fast_mode=True
    )
