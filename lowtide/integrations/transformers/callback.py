"""A callback for `transformers.Trainer`:

    Trainer(..., callbacks=[DeferLogits()])

`lowtide.defer_logits(model)` before the Trainer is made does the same, without an end.
"""

from typing import Any

from transformers import TrainerCallback

from lowtide.deferred import Deferral, defer_logits


class DeferLogits(TrainerCallback):
    """The model's logits are deferred while it trains, and real again afterwards; in between, evaluation has
    real logits, as the model is in eval mode then."""

    deferral: Deferral | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.deferral = defer_logits(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.deferral is not None:
            self.deferral.undo()
