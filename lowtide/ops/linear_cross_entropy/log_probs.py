"""Define the public function of log-probabilities. Its docstring is the contract."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lowtide.core.errors import advises
from lowtide.core.fsdp import gathers_head
from lowtide.ops.linear_cross_entropy import dispatch, sharding
from lowtide.ops.linear_cross_entropy.data_sharded import takes_data_sharded_head
from lowtide.ops.linear_cross_entropy.definition import advice
from lowtide.ops.linear_cross_entropy.definition.head import Backend, Tensors
from lowtide.ops.linear_cross_entropy.dispatch import LogProbs
from lowtide.ops.linear_cross_entropy.operator import signatures


@advises(advice.INSTEAD_OF_IN_LOG_PROBS, advice.USAGE)
@gathers_head
@takes_data_sharded_head
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor | None = None,
    ignore_index: int | None = -100,
    workspace: int | None = None,
    backend: Backend = "auto",
    group: ProcessGroup | None = None,
    first_class: int | None = None,
    num_classes: int | None = None,
    tokens_sharded: bool = False,
    segments: int | None = None,
) -> LogProbs:
    r"""Return `LogProbs(log_prob, entropy, logsumexp, argmax)` of each token, without the logits.

    Example::

        out = lowtide.linear_log_probs(
            hidden, model.lm_head.weight, tokens, logit_scale=1 / temperature
        )
        ratio = (out.log_prob - old_log_prob).exp()

    With the logits :math:`z_i` of :func:`linear_cross_entropy` and
    :math:`p_i = \mathrm{softmax}(z_i)`,

    .. math::
        \mathrm{log\_prob}_i = z_{i t_i} - \mathrm{lse}(z_i), \quad
        \mathrm{entropy}_i = -\sum_v p_{iv} \log p_{iv},

    .. math::
        \mathrm{logsumexp}_i = \mathrm{lse}(z_i), \quad
        \mathrm{argmax}_i = \operatorname{argmax}_v z_{iv}.

    The first three are differentiable with respect to input, linear_weight, linear_bias and
    logit_scale, for any upstream gradient of each, alone or together:

    .. math::
        \frac{\partial\, \mathrm{log\_prob}}{\partial z_v} = [v = t] - p_v, \quad
        \frac{\partial\, \mathrm{entropy}}{\partial z_v} = -p_v (\log p_v + \mathrm{entropy}), \quad
        \frac{\partial\, \mathrm{lse}}{\partial z_v} = p_v.

    Shapes:
        input [..., D], linear_weight [V, D], target [...], linear_bias [V]; each result [...].

    Args:
        ignore_index: None means -100. A row with this target is skipped: its log_prob, entropy and
            logsumexp are 0, without gradient, and its argmax is -1. For entropy, logsumexp and
            argmax of every row, give every row a class.
        logit_scale: 1 / temperature; a float, or a 0-d tensor that may require a gradient.
        All other arguments are those of :func:`linear_cross_entropy`, also for a head whose classes
        are divided over ranks.

    Dtypes: the results are float32 (float64 for float64 input), argmax is int64. Entropy is in
    nats.

    Memory: O(workspace), never N V. Three numbers a row are kept for backward, which computes the
    logits once more (four products in all). Backward costs nothing for a result that has no
    upstream gradient.

    Precision: backward forms the probabilities p from forward's statistics and recomputed logits z,
    which may be rounded differently. So p and the entropy's gradient have an error of up to about
    eps * max|z| relative to p. This matters for logits of 1e5 and more, since float32 has 7 digits.
    A row with an infinite largest logit (of one class, or -inf of all) has NaN, as torch's
    log-softmax does, in its logsumexp too.

    Raises: as :func:`linear_cross_entropy`.

    Source: the per-token quantities of PPO (arxiv.org/abs/1707.06347), DPO
    (arxiv.org/abs/2305.18290) and GRPO (arxiv.org/abs/2402.03300); asked for in
    Liger-Kernel issue 873 and TRL issue 7244.
    """
    operands, known = Tensors(input, linear_weight, target, linear_bias, logit_scale), None
    options: dict[str, Any] = {
        "softcap": softcap,
        "ignore_index": ignore_index,
        "workspace": workspace,
        "backend": backend,
    }
    if group is first_class is num_classes is segments is None and not tokens_sharded:
        known = signatures.signature(operands, "log_probs", *options.values())
        remembered = signatures.run(known, operands)
        if remembered is not None:
            return LogProbs(*remembered)
    call, found = sharding.run_sharded(
        partial(_log_probs, **options),
        operands._asdict(),
        sharding.Division(group, first_class, num_classes, tokens_sharded, segments),
    )
    signatures.remember(known, operands, log_probs=True, **options)
    return LogProbs(*(call.returned(each, by_row=True) for each in found))


def _log_probs(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> LogProbs:
    """Compute the log-probabilities of this rank's tensors."""
    compute = partial(dispatch.log_probs, (input,), (linear_weight,), target, **options)
    if options["shard"] is None:
        return compute()
    operands = input, linear_weight, target
    return LogProbs(*signatures.through(operands, options, compute, log_probs=True))
