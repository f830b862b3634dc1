"""Define the formulas of row_math.py that kernels share, in Triton; Gluon kernels call them too."""

import triton
import triton.language as tl

from lowtide.core.kernels.triton_helpers import slope_of_tanh, tanh_and_room


@triton.jit
def transformed(u, scale, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Return the logits z of u, which includes the bias, and what `slope_of` takes.

    Without EXACT the slope loses digits where it is below 1e-4. That takes fewer registers, and is
    enough where the slope goes into bfloat16.

    A scaled z is rounded here, by adding 0. Else the compiler may fuse it with a sum that takes it:
    z - max of a z that is not rounded is not 0 at the maximum, and where logits are so large that
    float32 has no digits after the point, its exponential is 0 or infinite. With a soft cap kernels
    are launched without fused multiply-adds, or exponentials/spec.py limits the cap.
    """
    z = u
    bend = 0.0
    if SOFTCAP > 0:
        if scale is not None:
            z = u * scale
        capped, room = tanh_and_room(z / SOFTCAP if EXACT else z * (1.0 / SOFTCAP))
        z = capped * SOFTCAP
        bend = room if EXACT else capped
    elif scale is not None:
        z = tl.fma(u, scale, 0.0)
    return z, bend


@triton.jit
def slope_of(bend, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Return the slope dz/du / scale; compute it where it is needed, to save registers."""
    slope = 1.0
    if SOFTCAP > 0:
        slope = slope_of_tanh(bend) if EXACT else 1.0 - bend * bend
    return slope


@triton.jit
def whole_softmax_coef(softmax_coef, soft, soft_mass, lse_coef, lse):
    """Return what p_v is multiplied by in each row, once the row's statistics are known."""
    if soft is not None:
        softmax_coef += soft * soft_mass
    if lse_coef is not None:
        softmax_coef += lse_coef * lse
    return softmax_coef


@triton.jit
def target_nll(distance, others, total):
    """Return lse - z_t of each row; `distance` is max - z_t, and `total` the sum of exponentials.

    `others` is that sum without the target's, whose 1 would take its digits if z_t is the maximum.
    """
    return tl.where(distance == 0.0, log1p(others), distance + tl.log(total))


@triton.jit
def target_numerator(softmax_coef, target_coef, exp_target, others):
    """Return softmax_coef p_t - target_coef of each row, times the sum of exponentials.

    `others` is that sum without the target's. No two numbers near 1 are subtracted.
    """
    return (softmax_coef - target_coef) * exp_target - target_coef * others


@triton.jit
def log1p(x):
    """Return log(1 + x) for x >= 0, exact to a few units in the last place.

    The quotient restores what adding 1 rounds away; it is near 1, whatever was rounded. Large and
    infinite x lose nothing and must not be divided.
    """
    sum = 1.0 + x
    loses = (x < 1.0) & (sum != 1.0)
    quotient = tl.where(loses, x, 1.0) / tl.where(loses, sum - 1.0, 1.0)
    return tl.where(sum == 1.0, x, tl.log(sum) * quotient)
