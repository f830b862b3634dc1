"""Define a callback for Lightning.

Use it as

    lightning.Trainer(..., callbacks=[LightningDeferralCallback()])

`lowtide.defer_logits(module)` before `fit` does the same, but does not end with the fit.
"""

from typing import Any

from lightning.pytorch import Callback
from torch import nn

from lowtide.deferred import defer_logits
from lowtide.integrations.callback import DeferralCallback


class LightningDeferralCallback(DeferralCallback, Callback):
    """Defer the module's logits during `fit`; afterwards the module returns real logits again.

    Args:
        head: the name of the module that makes the logits. None finds it as `lowtide.defer_logits`
            does.
        workspace: bytes that each fused loss may hold; None for the default of
            `lowtide.defer_logits`.
    """

    def __init__(self, head: str | None = None, *, workspace: int | None = None) -> None:
        super().__init__(workspace)
        self.head = head

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        head = None if self.head is None else pl_module.get_submodule(self.head)
        self.deferral = defer_logits(pl_module, head=head, workspace=self.workspace)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self._undo()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self._undo()  # Lightning does not call on_fit_end after an error or an interrupt.
