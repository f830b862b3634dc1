"""Connect lowtide with Transformers.

This package has a callback for the Trainer, and an implementation for the AttentionInterface.

Modules, in the order of imports:

* bands: recognise a mask function that is a band of diagonals.
* masks: the masks that a model hands to its layers.
* attention: `register_attention`, and the function that a layer calls.
* callback: `TransformersDeferralCallback`, for the Trainer.
"""

from lowtide.integrations.transformers.attention import register_attention
from lowtide.integrations.transformers.callback import TransformersDeferralCallback
from lowtide.integrations.transformers.masks import DenseMaskWarning

__all__ = ["DenseMaskWarning", "TransformersDeferralCallback", "register_attention"]
