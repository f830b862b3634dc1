"""lowtide keeps the high-water mark of training memory low."""

from lowtide import attn_bias, distillation, losses
from lowtide.deferred import defer_logits
from lowtide.distributed import shard_head, tokens_per_rank
from lowtide.first_call import warmup
from lowtide.memory import peak_memory
from lowtide.ops.attention import (
    memory_efficient_attention,
    memory_efficient_attention_with_lse,
    merge_attentions,
    scaled_dot_product_attention,
)
from lowtide.ops.chunked_loss import chunked_loss
from lowtide.ops.linear_cross_entropy import (
    LinearCrossEntropyLoss,
    LogProbs,
    linear_cross_entropy,
    linear_log_probs,
)

__all__ = [
    "LinearCrossEntropyLoss",
    "LogProbs",
    "attn_bias",
    "chunked_loss",
    "defer_logits",
    "distillation",
    "linear_cross_entropy",
    "linear_log_probs",
    "losses",
    "memory_efficient_attention",
    "memory_efficient_attention_with_lse",
    "merge_attentions",
    "peak_memory",
    "scaled_dot_product_attention",
    "shard_head",
    "tokens_per_rank",
    "warmup",
]
__version__ = "0.2.0"
