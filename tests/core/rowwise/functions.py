"""A function of rows, and the same in plain torch."""

import torch

from lowtide.core.rowwise.row_function import Rowwise


def losses(rows, whole):
    x_CD, factor_C = rows
    (w_VD,) = whole
    return ((x_CD @ w_VD.T).logsumexp(1) * factor_C,), ()


def made(N=7, D=3, V=5, dtype=torch.float64):
    return tuple(torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((N, D), (N,), (V, D)))


def by_rows(x_ND, factor_N, w_VD, chunk=3):
    return Rowwise(losses, 2, 1, chunk)(x_ND, factor_N, w_VD)[0]


def dense(x_ND, factor_N, w_VD):
    return losses((x_ND, factor_N), (w_VD,))[0][0]
