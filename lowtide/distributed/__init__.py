"""Train with losses of lowtide over several ranks, by torch.distributed alone.

Modules:

* mean_over_ranks: `tokens_per_rank`, the normaliser of a mean over all ranks' tokens.
"""

from lowtide.distributed.mean_over_ranks import tokens_per_rank

__all__ = ["tokens_per_rank"]
