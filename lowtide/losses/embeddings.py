"""Compute contrastive losses of embedding pairs; the rows of one side are the other's classes."""

import torch
from torch import Tensor

from lowtide.core.checks import check_devices, check_tensors
from lowtide.core.errors import ArgumentError, ArgumentTypeError, advises
from lowtide.losses import advice
from lowtide.ops.linear_cross_entropy import linear_cross_entropy
from lowtide.ops.linear_cross_entropy.definition.head import Backend, Reduction


@advises(advice.INFO_NCE, advice.USAGE_OF_INFO_NCE)
def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    logit_scale: float | Tensor,
    reduction: Reduction = "mean",
    workspace: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Compute InfoNCE, the cross entropy of finding each query's key among all keys.

    Example::

        loss = info_nce(query, torch.cat([key, queue]), logit_scale=1 / 0.07)

    With s the logit scale,

    .. math:: \ell_i = -\log \frac{\exp(s\, q_i \cdot k_i)}{\sum_j \exp(s\, q_i \cdot k_j)}.

    Row i of key belongs to row i of query. Rows of key after the first B are negatives for every
    query (hard negatives, a queue, the keys of other ranks).

    Shapes: query [B, D], key [K, D] with K >= B; the result is 0-d, or [B] for
    ``reduction="none"``.

    Args:
        query, key: floating-point, on one device and of one dtype. Under autocast the dtypes may
            differ, unless one is float64. Both may require a gradient. They are not normalised
            here; see :func:`torch.nn.functional.normalize`.
        logit_scale: 1 / temperature; a 0-d tensor may require a gradient.
        reduction: `"mean"`, `"sum"` or `"none"`, over the B queries.
        workspace, backend: as for :func:`lowtide.linear_cross_entropy`; workspace is in bytes.

    Precision: that of :func:`lowtide.linear_cross_entropy`; the loss is float32, or float64 for
    float64.

    Memory: O(workspace) beside the gradients, never B K.

    Errors: those of :mod:`lowtide.losses`.

    Source: arxiv.org/abs/1807.03748
    """
    _check_sides(query=query, key=key)
    if key.dim() != 2 or key.shape[0] < query.shape[0] or key.shape[1] != query.shape[1]:
        raise ArgumentError(
            f"key must have shape [K, {query.shape[1]}] with K >= {query.shape[0]}, the rows of query, "
            f"got {list(key.shape)}"
        )
    target_B = torch.arange(query.shape[0], device=query.device)
    return linear_cross_entropy(
        query,
        key,
        target_B,
        logit_scale=logit_scale,
        reduction=reduction,
        workspace=workspace,
        backend=backend,
    )


@advises(advice.CONTRASTIVE, advice.USAGE_OF_CONTRASTIVE)
def contrastive(
    image: Tensor,
    text: Tensor,
    *,
    logit_scale: float | Tensor,
    workspace: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Compute CLIP's loss, the mean of :func:`info_nce` from images to texts and back.

    Example::

        image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
        loss = contrastive(image, text, logit_scale=model.logit_scale.exp())

    With s the logit scale, x the images and y the texts,

    .. math::
        L = -\frac{1}{2B} \sum_i \left(
            \log \frac{\exp(s\, x_i \cdot y_i)}{\sum_j \exp(s\, x_i \cdot y_j)}
            + \log \frac{\exp(s\, y_i \cdot x_i)}{\sum_j \exp(s\, y_i \cdot x_j)}\right).

    Shapes: image [B, D], text [B, D]; row i of image belongs to row i of text. The result is 0-d.

    Args:
        image, text: floating-point, on one device and of one dtype. Under autocast the dtypes may
            differ, unless one is float64. Both may require a gradient. They are not normalised
            here.
        logit_scale: the multiplier itself, a float or a 0-d tensor that may require a gradient.
            CLIP learns its logarithm and keeps the scale below 100: pass
            ``model.logit_scale.exp().clamp(max=100)``.
        workspace, backend: as for :func:`lowtide.linear_cross_entropy`; workspace is in bytes.

    Precision: that of :func:`lowtide.linear_cross_entropy` for each direction. The gradient of
    image, and that of text, is a sum over both directions, each rounded once. In bfloat16 this
    gives a relative error of 2.3e-3; a single rounding gives 1.7e-3.

    Memory: O(workspace), never B². Each direction holds its own gradients of image and text until
    backward.

    Errors: those of :mod:`lowtide.losses`.

    Source: arxiv.org/abs/2103.00020
    """
    _check_sides(image=image, text=text)
    if image.shape != text.shape:
        raise ArgumentError(
            f"text must have the shape of image ({list(image.shape)}), got {list(text.shape)}; "
            "for more texts than images use info_nce"
        )
    texts = info_nce(image, text, logit_scale=logit_scale, workspace=workspace, backend=backend)
    images = info_nce(text, image, logit_scale=logit_scale, workspace=workspace, backend=backend)
    return (texts + images) / 2


def _check_sides(**sides: Tensor) -> None:
    """Raise unless the two named tensors are matrices on one device, of one dtype or autocast."""
    (first_name, first), (name, second) = sides.items()
    check_tensors(sides)
    if first.dim() != 2:
        raise ArgumentError(f"{first_name} must have shape [B, D], got {list(first.shape)}")
    autocast = torch.is_autocast_enabled(first.device.type)
    if first.dtype != second.dtype and not (autocast and torch.float64 not in (first.dtype, second.dtype)):
        raise ArgumentTypeError(
            f"{name} must have the dtype of {first_name} ({first.dtype}), got {second.dtype}; "
            "cast one of them, or run under torch.autocast"
        )
    check_devices(sides, meta=True)
