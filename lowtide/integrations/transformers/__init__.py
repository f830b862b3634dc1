"""For Transformers: a callback of its Trainer, and an attention of its AttentionInterface."""

from lowtide.integrations.transformers.attention import register_attention
from lowtide.integrations.transformers.callback import DeferLogits
from lowtide.integrations.transformers.masks import DenseMaskWarning

__all__ = ["DeferLogits", "DenseMaskWarning", "register_attention"]
