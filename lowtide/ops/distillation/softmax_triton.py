"""Compute row statistics and the gradient from a tile of both heads' logits, in two Triton kernels.

softmax_torch.py has the same function in torch, and explains it.

Each program handles one row. The statistics of a KL divergence need one read of both heads' logits.
Those of Jensen-Shannon need maxima and sums first, and so a second read. The gradient takes one
more read. A half-precision gradient is written into the second half of its own row of float32
products. Written from the last class to the first, it never reaches a number that is still to be
read.

Shapes: C rows and B columns of one tile, whose statistics are those of the tile's classes. The
statistics kernel calls these columns V.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.elementwise import add_row_sum
from lowtide.core.kernels.backend import next_power_of_2
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.distillation.softmax_torch import HeadTile, Statistics
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton import LOWEST, gradient_view, load_logits

# Logits of each head per step of a program. With a bias or a soft cap, half as many fit in the
# registers.
BLOCK, BLOCK_WITH_OPTIONS, WARPS = 8192, 4096, 16


@triton.jit
def log1p(x):
    """Return log(1 + x).

    Near 0 this is the series of 2 artanh(x / (2 + x)), because 1 + x would round away the digits of
    a small x.
    """
    y = x / (2.0 + x)
    square = y * y
    series = 2.0 * y * (1.0 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(tl.abs(x) < 0.25, series, tl.log(1.0 + x))


@triton.jit
def expm1(x):
    """Return exp(x) - 1 for x <= 0, near 0 by Taylor's series."""
    y = tl.maximum(x, -0.25)
    series = 1.0 + y * (1 / 5) * (1.0 + y * (1 / 6) * (1.0 + y * (1 / 7)))
    series = y * (1.0 + y * 0.5 * (1.0 + y * (1 / 3) * (1.0 + y * 0.25 * series)))
    return tl.where(x > -0.25, series, tl.exp(x) - 1.0)


@triton.jit
def _weighted(weight_b, value_b):
    """Return weight times value, or 0 if the weight is 0, even beside an infinite value."""
    return weight_b * tl.where(weight_b == 0.0, 0.0, value_b)


@triton.jit
def _difference(a_b, b_b, excluded_b):
    """Return a - b, or 0 where a class is excluded."""
    return tl.where(excluded_b, 0.0, a_b) - tl.where(excluded_b, 0.0, b_b)


@triton.jit
def _online(z_b, value_b, max_b, sum_b, total_b):
    """Return the running maximum of z, sum of exp(z) and sum of exp(z) value with one more block.

    Both sums are relative to the maximum: they sum exp(z - max).
    """
    ratio_b = tl.exp(-tl.abs(z_b - max_b))
    new_b, old_b = tl.where(z_b > max_b, 1.0, ratio_b), tl.where(z_b > max_b, ratio_b, 1.0)
    return (
        tl.maximum(max_b, z_b),
        sum_b * old_b + new_b,
        _weighted(old_b, total_b) + _weighted(new_b, value_b),
    )


@triton.jit
def _gaps(s_b, t_b, log_ratio, beta):
    """Return s - m and t - m; s_b and t_b are the a of both heads, and log_ratio is d.

    divergences.py has the notation.
    """
    gap_b = _difference(t_b, s_b, tl.maximum(s_b, t_b) == -float("inf")) + log_ratio
    near_b = -log1p(tl.where(gap_b >= 0.0, 1.0 - beta, beta) * expm1(-tl.abs(gap_b)))
    return near_b - tl.maximum(gap_b, 0.0), tl.minimum(gap_b, 0.0) + near_b


@remember_launches
@triton.jit
def _statistics_kernel(
    own_CV_ptr,
    other_CV_ptr,
    own_bias_V_ptr,
    other_bias_V_ptr,
    own_max_C_ptr,
    own_sum_C_ptr,
    other_max_C_ptr,
    other_sum_C_ptr,
    log_ratio_C_ptr,
    mean_C_ptr,
    loss_C_ptr,
    V,
    own_stride,
    other_stride,
    scale,
    beta,
    OWN_CAP: tl.constexpr,
    OTHER_CAP: tl.constexpr,
    JENSEN_SHANNON: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the statistics of KL(own || other), or of Jensen-Shannon, where own is the student.

    Without SUMS, the maxima, the sums and their log-ratio are read instead of computed, and the
    statistics of Jensen-Shannon are computed from them.
    """
    row = tl.program_id(0).to(tl.int64)
    own_ptr, other_ptr = own_CV_ptr + row * own_stride, other_CV_ptr + row * other_stride
    if SUMS:
        own_max_b, other_max_b = tl.full([BLOCK], LOWEST, tl.float32), tl.full([BLOCK], LOWEST, tl.float32)
        own_sum_b, other_sum_b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        ahead_b = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            own_b, _, _ = load_logits(own_ptr, own_bias_V_ptr, scale, columns, V, OWN_CAP)
            other_b, _, _ = load_logits(other_ptr, other_bias_V_ptr, scale, columns, V, OTHER_CAP)
            value_b = _difference(own_b, other_b, own_b == -float("inf"))
            own_max_b, own_sum_b, ahead_b = _online(own_b, value_b, own_max_b, own_sum_b, ahead_b)
            other_max_b, other_sum_b, _ = _online(other_b, 0.0, other_max_b, other_sum_b, other_sum_b)
        own_max, other_max = tl.max(own_max_b, 0), tl.max(other_max_b, 0)
        share_b = tl.exp(own_max_b - own_max)
        own_sum_b, other_sum_b = own_sum_b * share_b, other_sum_b * tl.exp(other_max_b - other_max)
        own_sum, other_sum = tl.sum(own_sum_b, 0), tl.sum(other_sum_b, 0)
        excess = tl.sum(own_sum_b - other_sum_b, 0) / other_sum
        log_ratio = tl.where(tl.abs(excess) < 0.25, log1p(excess), tl.log(own_sum / other_sum))
        mean = tl.sum(_weighted(share_b, ahead_b), 0) / own_sum - (own_max - other_max)
    else:
        own_max, own_sum = tl.load(own_max_C_ptr + row), tl.load(own_sum_C_ptr + row)
        other_max, other_sum = tl.load(other_max_C_ptr + row), tl.load(other_sum_C_ptr + row)
        log_ratio, mean = tl.load(log_ratio_C_ptr + row), 0.0
    loss = mean - log_ratio
    if JENSEN_SHANNON:
        mean, loss = 0.0, 0.0
        blocks = tl.cdiv(V, BLOCK)
        for step in range(blocks):  # backwards: what was read last is still in the L2 cache
            columns = (blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
            own_b, _, _ = load_logits(own_ptr, own_bias_V_ptr, scale, columns, V, OWN_CAP)
            other_b, _, _ = load_logits(other_ptr, other_bias_V_ptr, scale, columns, V, OTHER_CAP)
            own_b, other_b = own_b - own_max, other_b - other_max
            own_gap_b, other_gap_b = _gaps(own_b, other_b, log_ratio, beta)
            own_term_b = _weighted(tl.exp(own_b) / own_sum, own_gap_b)
            other_term_b = _weighted(tl.exp(other_b) / other_sum, other_gap_b)
            mean += tl.sum(own_term_b, 0)
            loss += tl.sum(beta * other_term_b + (1.0 - beta) * own_term_b, 0)
    tl.store(own_max_C_ptr + row, own_max)
    tl.store(own_sum_C_ptr + row, own_sum)
    tl.store(other_max_C_ptr + row, other_max)
    tl.store(other_sum_C_ptr + row, other_sum)
    tl.store(log_ratio_C_ptr + row, log_ratio)
    tl.store(mean_C_ptr + row, mean)
    tl.store(loss_C_ptr + row, loss)


@remember_launches
@triton.jit
def _gradient_kernel(
    student_CB_ptr,
    teacher_CB_ptr,
    student_bias_B_ptr,
    teacher_bias_B_ptr,
    student_max_C_ptr,
    student_sum_C_ptr,
    teacher_max_C_ptr,
    teacher_sum_C_ptr,
    log_ratio_C_ptr,
    mean_C_ptr,
    coef_C_ptr,
    grad_CB_ptr,
    B,
    student_stride,
    teacher_stride,
    grad_stride,
    scale,
    beta,
    STUDENT_CAP: tl.constexpr,
    TEACHER_CAP: tl.constexpr,
    FORWARD: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient with respect to the student's product, times the row's coefficient."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr, teacher_ptr = student_CB_ptr + row * student_stride, teacher_CB_ptr + row * teacher_stride
    student_max, student_sum = tl.load(student_max_C_ptr + row), tl.load(student_sum_C_ptr + row)
    teacher_max, teacher_sum = tl.load(teacher_max_C_ptr + row), tl.load(teacher_sum_C_ptr + row)
    mean, coef = tl.load(mean_C_ptr + row), tl.load(coef_C_ptr + row)
    log_ratio = tl.load(log_ratio_C_ptr + row)
    blocks = tl.cdiv(B, BLOCK)
    for step in range(blocks):
        columns = (blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
        s_b, _, slope_b = load_logits(student_ptr, student_bias_B_ptr, scale, columns, B, STUDENT_CAP)
        t_b, _, _ = load_logits(teacher_ptr, teacher_bias_B_ptr, scale, columns, B, TEACHER_CAP)
        s_b, t_b = s_b - student_max, t_b - teacher_max
        student_b = tl.exp(s_b) / student_sum
        if FORWARD:
            grad_b = student_b - tl.exp(t_b) / teacher_sum
        elif REVERSE:
            grad_b = _weighted(student_b, _difference(s_b, t_b, student_b == 0.0) - mean)
        else:
            s_gap_b, _ = _gaps(s_b, t_b, log_ratio, beta)
            grad_b = (1.0 - beta) * _weighted(student_b, s_gap_b - mean)
        grad_b = grad_b * slope_b * coef
        tl.debug_barrier()  # all threads read their logits before one overwrites them
        tl.store(
            grad_CB_ptr + row * grad_stride + columns,
            grad_b.to(grad_CB_ptr.dtype.element_ty),
            mask=columns < B,
        )


def divergence_(
    student: HeadTile,
    teacher: HeadTile,
    statistics: Statistics,
    coef_C: Tensor,
    beta: float,
    *,
    take_sums: bool,
    take_means: bool,
    gradient_dtype: torch.dtype | None,
    pass_logits: int,
    part: bool = False,
    bias_sum_B: Tensor | None = None,
) -> Tensor | None:  # [C, B]
    """Compute the statistics, and write the gradient over the student's product.

    softmax_torch.py describes the arguments. `pass_logits` is not used here, and the rows that are
    added to `bias_sum_B` are rounded.
    """
    (C, B), stat = student.product_CB.shape, statistics
    transforms = of_student, of_teacher = student.transform, teacher.transform
    plain = all(each.bias_V is None and not each.softcap for each in transforms)
    block = min(BLOCK if plain else BLOCK_WITH_OPTIONS, next_power_of_2(B))
    # With fused multiply-adds the difference of two equal products is not 0. This error would count
    # if the student is close to its teacher.
    options = {"BLOCK": block, "num_warps": WARPS if block >= 4096 else 4, "enable_fp_fusion": False}
    scale = 1 / of_student.temperature
    if (take_sums or take_means) and C:
        heads = (
            (student, stat.student_max_N, stat.student_sum_N),
            (teacher, stat.teacher_max_N, stat.teacher_sum_N),
        )
        own, other = heads if beta else heads[::-1]
        _statistics_kernel[(C,)](
            own[0].product_CB,
            other[0].product_CB,
            own[0].transform.bias_V,
            other[0].transform.bias_V,
            *own[1:],
            *other[1:],
            stat.log_ratio_N,
            stat.mean_N,
            stat.loss_N,
            B,
            own[0].product_CB.stride(0),
            other[0].product_CB.stride(0),
            scale,
            beta,
            OWN_CAP=own[0].transform.largest,
            OTHER_CAP=other[0].transform.largest,
            JENSEN_SHANNON=take_means and 0 < beta < 1,
            SUMS=take_sums,
            **options,
        )
        if part and take_sums and beta == 0:
            stat.log_ratio_N.neg_()  # d is log(S_s / S_t), and the kernel's own head is the teacher
    if gradient_dtype is None:
        return None
    grad_CB = gradient_view(student.product_CB, gradient_dtype)
    if C:
        _gradient_kernel[(C,)](
            student.product_CB,
            teacher.product_CB,
            of_student.bias_V,
            of_teacher.bias_V,
            *stat.vectors[1:],  # all but the losses
            coef_C,
            grad_CB,
            B,
            student.product_CB.stride(0),
            teacher.product_CB.stride(0),
            grad_CB.stride(0),
            scale,
            beta,
            STUDENT_CAP=of_student.largest,
            TEACHER_CAP=of_teacher.largest,
            FORWARD=beta == 0,
            REVERSE=beta == 1,
            **options,
        )
    add_row_sum(bias_sum_B, grad_CB)
    return grad_CB
