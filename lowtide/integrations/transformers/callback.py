"""Define a callback for `transformers.Trainer`.

Use it as

    Trainer(..., callbacks=[TransformersDeferralCallback()])

`lowtide.defer_logits(model)` before the Trainer is made does the same, but does not end with the
training.
"""

from typing import Any

from transformers import TrainerCallback

from lowtide.core.errors import ArgumentError
from lowtide.deferred import defer_logits
from lowtide.integrations.callback import DeferralCallback


class TransformersDeferralCallback(DeferralCallback, TrainerCallback):
    """Defer the model's logits during training; afterwards the model returns real logits again.

    An evaluation during training has real logits, because the model is then in eval mode. The
    trainers of TRL need `lowtide.integrations.trl.TRLDeferralCallback`.

    Args:
        workspace: bytes that each fused loss may hold; None for the default of
            `lowtide.defer_logits`.
    """

    def __init__(self, *, workspace: int | None = None) -> None:
        super().__init__(workspace)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if getattr(args, "n_gpu", 1) > 1:
            raise ArgumentError(
                f"the Trainer would run {args.n_gpu} GPUs in one process by DataParallel, which copies the "
                "logits of each to the first; start one process a GPU (torchrun, accelerate launch), or let "
                "it see one GPU (CUDA_VISIBLE_DEVICES)"
            )
        self._undo()  # An earlier run may have ended in an error.
        self.deferral = defer_logits(model, workspace=self.workspace)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._undo()
