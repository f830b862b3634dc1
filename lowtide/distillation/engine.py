"""The chunk engine: losses and the student's gradients from products of chunks, in bounded memory.

For a chunk of C rows, the logits of student and teacher in float32, side by side; tile by tile of rows, the
loss and the gradient G of the student's logits, which is formed in float32, rounded once to the operands'
dtype, and put where those logits were; then dX_c = G W and dW += G^T X_c, the sum kept in float32 by the
product itself. Where a soft cap c bends the student's logits, z = c tanh(u / c), G has its slope 1 - (z/c)^2.

What all rows share, 1 / (temperature n), stays out of G, where it would round all small numbers alike. It is
a mantissa and a power of two: the mantissa goes into dX as that is rounded, and the power of two is left for
backward, which it costs no rounding, and keeps float16 clear of 0 and infinity whatever n or loss scale.

Shapes: N rows, D features, V classes; C rows of a chunk, c rows of a tile.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.distillation.divergences import losses_and_gradients
from lowtide.distillation.heads import Heads, Options, Side
from lowtide.distillation.sizes import choose_sizes, operand_dtype, padded
from lowtide.linear_cross_entropy.operands import Operand, product
from lowtide.linear_cross_entropy.scaling import scale_into

# A row of float16 gradients with upstream 1 is held 2^8 larger: p down to 2^-22 at full precision, and room
# for a reverse KL's p (s - t - L), which may exceed 1.
FLOAT16_EXPONENT = 8


class Distilled(NamedTuple):
    """Times scale, the gradients are what was asked for; empty where nothing was."""

    loss: Tensor  # 0-d or [...]
    input: Tensor  # [..., D_s], in the input's dtype
    weight: Tensor  # [V, D_s], in the dtype of the sums
    bias: Tensor  # [V], in the dtype of the sums
    scale: Tensor  # [2]: of the input's gradient; of the weight's and the bias's


def distill(heads: Heads, options: Options, wanted: Sequence[bool], upstream: Tensor | None) -> Distilled:
    """The loss, and the wanted gradients of the sum of upstream * loss (upstream None: 1 for each)."""
    N, V, D = heads.rows, heads.classes, heads.student_input.shape[-1]
    sizes = choose_sizes(heads, options)
    student = _Head(heads.student, options.student_dtype, options.student_softcap, options)
    teacher = _Head(heads.teacher, options.teacher_dtype, options.teacher_softcap, options)
    ignored_N1 = None if heads.ignored is None else heads.ignored.reshape(N, 1)
    factors = _factors(heads, options, ignored_N1, upstream)

    def new(*shape: int, dtype: torch.dtype = options.sum_dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=heads.device)

    loss = new(*heads.leading)
    dx = new(*heads.student_input.shape, dtype=heads.student_input.dtype) if wanted[0] else new(0)
    dw_VD = new(V, D) if wanted[1] else new(0)
    db_V = new(V).zero_() if wanted[2] else new(0)
    if N == 0:
        dw_VD.zero_()
    loss_N, dx_ND = loss.view(N), dx.view(N, D) if wanted[0] else dx
    student_CV, teacher_CV = new(sizes.rows, padded(V))[:, :V], new(sizes.rows, padded(V))[:, :V]
    sum_CD = new(sizes.rows, D) if wanted[0] and dx.dtype != options.sum_dtype else None

    for start in range(0, N, sizes.rows):
        rows = slice(start, min(start + sizes.rows, N))
        s_CV, t_CV = student_CV[: rows.stop - start], teacher_CV[: rows.stop - start]
        teacher.logits(t_CV, teacher.counted_rows(rows, ignored_N1), sizes.classes)
        x_CD = student.counted_rows(rows, ignored_N1)
        student.logits(s_CV, x_CD, sizes.classes)
        loss_C, pull_C1 = loss_N[rows], factors.pull_N1[rows]
        g_CV = s_CV.view(student.dtype)[:, :V]  # where the logits were, in as many bytes or half of them
        for tile in _blocks(len(x_CD), sizes.tile_rows):
            s_cv, t_cv = s_CV[tile].log_softmax(1), t_CV[tile].log_softmax(1)
            loss_C[tile], gradient_cv = losses_and_gradients(s_cv, t_cv, options.beta)
            if any(wanted):
                student.bend(gradient_cv, s_CV[tile])
                torch.mul(gradient_cv, pull_C1[tile], out=g_CV[tile])
            del s_cv, t_cv, gradient_cv  # before the next are made
        if wanted[0]:
            dx_CD = dx_ND[rows] if sum_CD is None else sum_CD[: len(x_CD)]
            for classes in _blocks(V, sizes.classes):
                product(dx_CD, g_CV[:, classes], student.weight(classes), add=classes.start > 0)
            scale_into(dx_ND[rows], dx_CD, factors.mantissa, "torch")
        if wanted[1]:
            product(dw_VD, g_CV.t(), x_CD, add=start > 0)
        if wanted[2]:
            db_V.add_(g_CV.sum(0, dtype=db_V.dtype))
        del x_CD, g_CV  # copies, some of them: gone before the next are made

    if heads.ignored is not None:
        loss.masked_fill_(heads.ignored, 0)
    if options.reduction != "none":
        loss = loss.sum()
    if options.reduction == "mean":
        loss.div_(factors.counted)  # of nothing: NaN, as in torch
    return Distilled(loss, dx, dw_VD, db_V, factors.scale)


class _Factors(NamedTuple):
    pull_N1: Tensor
    """What the gradient of each row's logits is multiplied by; 0 where the row is ignored."""
    counted: Tensor
    mantissa: Tensor
    scale: Tensor  # [2]


def _factors(heads: Heads, options: Options, ignored_N1: Tensor | None, upstream: Tensor | None) -> _Factors:
    N = heads.rows
    pull_N1 = torch.ones(N, 1, dtype=options.sum_dtype, device=heads.device)
    counted = torch.full((), N, dtype=options.sum_dtype, device=heads.device)
    if upstream is not None:
        pull_N1.mul_(upstream.reshape(N, 1))
    if ignored_N1 is not None:
        pull_N1.masked_fill_(ignored_N1, 0)
        counted.sub_(ignored_N1.sum())
    factor = torch.full_like(counted, 1 / options.temperature)
    if options.reduction == "mean":
        factor.div_(counted.clamp(min=1))
    if options.student_dtype == torch.float16 and N > 0:
        # What is smaller than 2^-100 is 0 in float16 however it is scaled.
        exponent = torch.frexp(pull_N1.abs().amax()).exponent.clamp(min=-100)
        lift = _power_of_two(FLOAT16_EXPONENT - exponent, factor)
        pull_N1.mul_(lift), factor.div_(lift)
    mantissa, exponent = torch.frexp(factor)
    return _Factors(pull_N1, counted, mantissa, torch.stack((_power_of_two(exponent, factor), factor)))


def _power_of_two(exponent: Tensor, like: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(like), exponent)


class _Head(Operand):
    """Student or teacher: operands of products, and what comes after."""

    def __init__(self, side: Side, dtype: torch.dtype, softcap: float, options: Options) -> None:
        input, weight_VD, bias_V = side
        super().__init__(input, weight_VD, operand_dtype(dtype, input.device.type), True, None)
        self.bias_V = None if bias_V is None else bias_V.to(options.sum_dtype)
        self.temperature = options.temperature
        self.softcap = softcap
        self.largest = softcap / options.temperature  # what no capped logit exceeds

    def counted_rows(self, rows: slice, ignored_N1: Tensor | None) -> Tensor:
        """Zeros in place of what is ignored: it may be NaN, which no factor takes to 0."""
        x_CD = self.rows(rows)
        return x_CD if ignored_N1 is None else x_CD.masked_fill(ignored_N1[rows], 0)

    def logits(self, out_CV: Tensor, x_CD: Tensor, classes_at_once: int) -> None:
        for classes in _blocks(out_CV.shape[1], classes_at_once):
            product(out_CV[:, classes], x_CD, self.weight(classes).t())
        if self.bias_V is not None:
            out_CV.add_(self.bias_V)
        if self.softcap:
            out_CV.div_(self.softcap).tanh_().mul_(self.largest)
        elif self.temperature != 1:
            out_CV.div_(self.temperature)

    def bend(self, gradient_cv: Tensor, logits_cv: Tensor) -> None:
        """From the gradient of the logits to that of what the soft cap took, temperature apart."""
        if self.softcap:
            gradient_cv.mul_((logits_cv / self.largest).square_().neg_().add_(1))


def _blocks(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
