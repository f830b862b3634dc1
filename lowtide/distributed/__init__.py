"""Train with losses of lowtide over several ranks, by torch.distributed alone.

Modules:

* sharded_head: `shard_head`, a head whose classes stay divided over the data-parallel ranks.

`tokens_per_rank`, the normalizer of a mean over all ranks' tokens, comes from
ops/linear_cross_entropy/token_count.py.
"""

from lowtide.distributed.sharded_head import shard_head
from lowtide.ops.linear_cross_entropy.token_count import tokens_per_rank

__all__ = ["shard_head", "tokens_per_rank"]
