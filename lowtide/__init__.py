"""lowtide keeps the high-water mark of training memory low.

Folders, in the order of imports:

* core: what several operators use.
* ops: the operators, one folder each.
* losses: losses of a head or of log-probabilities.
* deferred: a model's own code without its logits.
* distributed: heads divided over data-parallel ranks.
* integrations: callbacks for Transformers, TRL and Lightning.
* tools: what the commands do; they use the public names below.
* cli: the commands. `__main__` runs them for `python -m lowtide`.

Modules of public names:

* attn_bias: masks of attention.
* distillation: divergences between two heads.
* first_call: `warmup`, which compiles before the first step.
* memory: `peak_memory`.
"""

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
