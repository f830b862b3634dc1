from lowtide.ops.attention.api import (
    memory_efficient_attention,
    memory_efficient_attention_with_lse,
    scaled_dot_product_attention,
)
from lowtide.ops.attention.merge import merge_attentions

__all__ = [
    "memory_efficient_attention",
    "memory_efficient_attention_with_lse",
    "merge_attentions",
    "scaled_dot_product_attention",
]
