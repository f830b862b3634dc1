"""Define the formulas of row_math.py that kernels share, in Triton; Gluon kernels call them too."""

import triton
import triton.language as tl

from lowtide.core.kernels.triton_helpers import slope_of_tanh, tanh_and_room


@triton.jit
def transformed(u, scale, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Return the logits z of u, and the argument of `slope_of`. u includes the bias.

    Without EXACT the slope loses digits where it is below 1e-4. This takes fewer registers, and is
    exact enough for a slope that goes into bfloat16.

    A scaled z is rounded here, by an fma that adds 0. Otherwise the compiler may fuse u * scale
    with the subtraction of the maximum. At the maximum, z - max of a z that is not rounded is not
    0. Where logits are so large that float32 has no digits after the point, the exponential of this
    difference is 0 or infinite. With a soft cap, kernels are launched without fused multiply-adds,
    or exponentials/spec.py limits the cap.
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
    """Return the slope dz/du / scale; called where it is needed, which saves registers."""
    slope = 1.0
    if SOFTCAP > 0:
        slope = slope_of_tanh(bend) if EXACT else 1.0 - bend * bend
    return slope


@triton.jit
def whole_softmax_coef(softmax_coef, soft, soft_mass, lse_coef, lse):
    """Return softmax_coef of each row, with the terms that depend on the row's statistics."""
    if soft is not None:
        softmax_coef += soft * soft_mass
    if lse_coef is not None:
        softmax_coef += lse_coef * lse
    return softmax_coef


@triton.jit
def target_nll(distance, others, total):
    """Return lse - z_t of each row; `distance` is max - z_t, and `total` the sum of exponentials.

    `others` is the sum without the target's exponential. If z_t is the maximum, this exponential is
    1, and a total near 1 has lost the digits of the others.
    """
    return tl.where(distance == 0.0, log1p(others), distance + tl.log(total))


@triton.jit
def target_numerator(softmax_coef, target_coef, exp_target, others):
    """Return (softmax_coef p_t - target_coef) times the sum of exponentials, for each row.

    `others` is the sum without the target's exponential. No two numbers near 1 are subtracted.
    """
    return (softmax_coef - target_coef) * exp_target - target_coef * others


@triton.jit
def log1p(x):
    """Return log(1 + x) for x >= 0, exact to a few units in the last place.

    log(sum) is multiplied by x / (sum - 1), a quotient near 1 that makes up for the rounding of the
    sum 1 + x. For x >= 1 this is not needed, and an infinite x must not be divided.
    """
    sum = 1.0 + x
    loses = (x < 1.0) & (sum != 1.0)
    quotient = tl.where(loses, x, 1.0) / tl.where(loses, sum - 1.0, 1.0)
    return tl.where(sum == 1.0, x, tl.log(sum) * quotient)
