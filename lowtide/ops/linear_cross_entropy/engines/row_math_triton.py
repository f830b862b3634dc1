"""Define the formulas of row_math.py that kernels share, in Triton; Gluon kernels call them too."""

import triton
import triton.language as tl

from lowtide.core.triton_helpers import slope_of_tanh, tanh_and_room


@triton.jit
def transformed(u, scale, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Return the logits z of u, which includes the bias, and the slope dz/du / scale.

    Without EXACT the slope loses digits where it is below 1e-4. That takes fewer registers, and is
    enough where the slope goes into bfloat16.
    """
    z = u
    if scale is not None:
        z = u * scale
    slope = 1.0
    if SOFTCAP > 0:
        if EXACT:
            capped, room = tanh_and_room(z / SOFTCAP)
            slope = slope_of_tanh(room)
        else:
            capped, _ = tanh_and_room(z * (1.0 / SOFTCAP))
            slope = 1.0 - capped * capped
        z = capped * SOFTCAP
    return z, slope


@triton.jit
def whole_softmax_coef(softmax_coef, soft, soft_mass, lse_coef, lse):
    """Return what p_v is multiplied by in each row, once the row's statistics are known."""
    if soft is not None:
        softmax_coef += soft * soft_mass
    if lse_coef is not None:
        softmax_coef += lse_coef * lse
    return softmax_coef
