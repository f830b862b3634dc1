"""Compute preference losses from log-probabilities of whole sequences.

Log-probabilities under the reference are constants and take no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.errors import ArgumentError, ArgumentTypeError, advises
from lowtide.losses import advice
from lowtide.losses.common import Reduction, check_numbers, check_shape, reduced, widened


@advises(advice.DPO, advice.USAGE_OF_DPO)
def dpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute the loss of direct preference optimisation (DPO), or cDPO with label smoothing.

    Example::

        chosen, rejected = sequence_log_probs(hidden, head.weight, target).chunk(2)
        loss = dpo(chosen, rejected, reference_chosen, reference_rejected, beta=0.1)

    With :math:`\epsilon` the rate of wrong labels (cDPO; 0 gives DPO),

    .. math::
        \delta = \beta \left(\log \frac{\pi(y_w)}{\pi_\mathrm{ref}(y_w)}
                 - \log \frac{\pi(y_l)}{\pi_\mathrm{ref}(y_l)}\right), \qquad
        \ell = -(1-\epsilon) \log \sigma(\delta) - \epsilon \log \sigma(-\delta).

    Shapes: all four [B], sums from :func:`sequence_log_probs`; the result is 0-d, or [B] for
    ``reduction="none"``.

    Args:
        beta: :math:`\beta`, the strength of the pull towards the reference.
        label_smoothing: :math:`\epsilon`, in [0, 0.5].
        reduction: `"mean"`, `"sum"` or `"none"`, over the B pairs.

    Precision, memory and errors: those of :mod:`lowtide.losses`.

    Source: arxiv.org/abs/2305.18290; for cDPO its author's note, ericmitchell.ai/cdpo.pdf
    """
    check_numbers(beta=beta, label_smoothing=label_smoothing)
    if not 0 <= label_smoothing <= 0.5:
        raise ArgumentError(f"label_smoothing must be in [0, 0.5], got {label_smoothing}")
    chosen_B, rejected_B, reference_chosen_B, reference_rejected_B = widened(
        "B",
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    chosen_B = chosen_B - reference_chosen_B.detach()
    rejected_B = rejected_B - reference_rejected_B.detach()
    delta_B = beta * (chosen_B - rejected_B)
    loss_B = -(1 - label_smoothing) * F.logsigmoid(delta_B) - label_smoothing * F.logsigmoid(-delta_B)
    return reduced(loss_B, reduction)


@advises(advice.SIMPO, advice.USAGE_OF_PAIRS)
def simpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    *,
    beta: float = 2.0,
    gamma: float = 0.5,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute SimPO's loss, a preference by length-normalised log-probability with a margin.

    Example::

        log_prob = sequence_log_probs(hidden, head.weight, target, reduction="mean")
        chosen, rejected = log_prob.chunk(2)
        loss = simpo(chosen, rejected, beta=2.0, gamma=0.5)

    It needs no reference:

    .. math::
        \ell = -\log \sigma\!\left(\frac{\beta}{|y_w|} \log \pi(y_w)
               - \frac{\beta}{|y_l|} \log \pi(y_l) - \gamma\right)

    Shapes: both tensors [B], *means* from :func:`sequence_log_probs`; the result is 0-d, or [B] for
    ``reduction="none"``.

    Args:
        beta: :math:`\beta`, the scale of the difference.
        gamma: the margin itself, as in the paper (whose code takes gamma / beta).
        reduction: `"mean"`, `"sum"` or `"none"`, over the B pairs.

    Precision, memory and errors: those of :mod:`lowtide.losses`.

    Source: arxiv.org/abs/2405.14734
    """
    check_numbers(beta=beta, gamma=gamma)
    chosen_B, rejected_B = widened("B", policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    return reduced(-F.logsigmoid(beta * (chosen_B - rejected_B) - gamma), reduction)


@advises(advice.ORPO, advice.USAGE_OF_PAIRS)
def orpo(
    policy_chosen: Tensor, policy_rejected: Tensor, *, beta: float = 0.1, reduction: Reduction = "mean"
) -> Tensor:
    r"""Compute ORPO's loss, the chosen sequence's negative log-likelihood plus an odds ratio.

    Example::

        log_prob = sequence_log_probs(hidden, head.weight, target, reduction="mean")
        chosen, rejected = log_prob.chunk(2)
        loss = orpo(chosen, rejected, beta=0.1)

    .. math::
        \log p = \frac{1}{|y|} \log \pi(y), \qquad
        \ell = -\log p_w
               - \beta \log \sigma\!\left(\log \frac{p_w}{1 - p_w} - \log \frac{p_l}{1 - p_l}\right)

    :math:`\beta` is the paper's :math:`\lambda`. The first term is the mean over the sequence's own
    tokens. For a mean over all tokens of the batch, or over the prompt too, add the difference
    yourself.

    Shapes: both tensors [B], *means* from :func:`sequence_log_probs`; the result is 0-d, or [B] for
    ``reduction="none"``.

    Args:
        beta: :math:`\beta`, the weight of the odds ratio.
        reduction: `"mean"`, `"sum"` or `"none"`, over the B pairs.

    Precision, memory and errors: those of :mod:`lowtide.losses`.

    Source: arxiv.org/abs/2403.07691
    """
    check_numbers(beta=beta)
    chosen_B, rejected_B = widened("B", policy_chosen=policy_chosen, policy_rejected=policy_rejected)
    log_odds_ratio_B = _log_odds(chosen_B) - _log_odds(rejected_B)
    return reduced(-chosen_B - beta * F.logsigmoid(log_odds_ratio_B), reduction)


@advises(advice.KTO, advice.USAGE_OF_KTO)
def kto(
    policy: Tensor,
    reference: Tensor,
    label: Tensor,
    kl: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    r"""Compute KTO's loss of single sequences, each labelled desirable or not, against a baseline.

    Example::

        policy = sequence_log_probs(hidden, head.weight, target)
        loss = kto(policy, reference, label, policy_mismatched - reference_mismatched)

    It needs no pairs: each sequence's gain over the reference is compared with the baseline z_0.

    .. math::
        r = \log \frac{\pi(y|x)}{\pi_\mathrm{ref}(y|x)}, \quad
        z_0 = \max\Bigl(0, \frac{1}{M} \sum_m k_m\Bigr), \quad
        \ell = \begin{cases} \lambda_D\, \sigma(\beta (z_0 - r)) & \text{desirable} \\
                             \lambda_U\, \sigma(\beta (r - z_0)) & \text{not} \end{cases}

    This is the paper's :math:`\lambda_y - v(x, y)`. The baseline takes no gradient.

    Shapes: policy [B] and reference [B], sums from :func:`sequence_log_probs`; label [B]; kl [M] or
    []; the result is 0-d, or [B] for ``reduction="none"``.

    Args:
        label: a bool tensor, True for desirable.
        kl: k, the log-probability under the policy minus that under the reference, of M mismatched
            sequences: prompt i with the completion of another prompt j. Or the mean of k, 0-d or a
            float; with several ranks, the mean over all ranks. Compute k under no_grad.
        beta: :math:`\beta`, the slope of the sigmoid.
        desirable_weight, undesirable_weight: :math:`\lambda_D` and :math:`\lambda_U`.
        reduction: `"mean"`, `"sum"` or `"none"`, over the B sequences.

    Precision: computed in float32, or in float64 where policy or reference is float64.

    Memory and errors: those of :mod:`lowtide.losses`.

    Source: arxiv.org/abs/2402.01306
    """
    check_numbers(beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    policy_B, reference_B = widened("B", policy=policy, reference=reference)
    check_shape("label", label, policy.shape, "; pass torch.tensor(label)" * isinstance(label, (list, tuple)))
    if label.dtype != torch.bool:
        raise ArgumentTypeError(
            f"label must be bool, True for desirable, got {label.dtype}; if 1 is desirable, pass label == 1"
        )
    if isinstance(kl, (int, float)):
        kl = torch.full((), kl, dtype=policy_B.dtype, device=policy.device)
    if not isinstance(kl, Tensor):
        raise ArgumentTypeError(f"kl must be a torch.Tensor or a float, got {type(kl).__name__}")
    if kl.is_complex():
        raise ArgumentTypeError(f"kl must hold real numbers, got {kl.dtype}")
    if kl.dim() > 1 or kl.numel() == 0:
        raise ArgumentError(f"kl must have shape [M], M > 0, or [], got {list(kl.shape)}")
    baseline = kl.detach().to(policy_B.dtype).mean().clamp(min=0)
    gain_B = beta * (policy_B - reference_B.detach() - baseline)
    # λ - λ σ(x) is λ σ(-x), which keeps its digits where σ(x) is near 1.
    loss_B = torch.where(
        label, desirable_weight * torch.sigmoid(-gain_B), undesirable_weight * torch.sigmoid(gain_B)
    )
    return reduced(loss_B, reduction)


def _log_odds(log_p: Tensor) -> Tensor:
    """Return log(p / (1 - p)), finite and without gradient at p = 1.

    p = 1 is a sequence in which no token counts.
    """
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)
    return log_p - torch.log(-torch.expm1(log_p))
