"""Define what the callbacks that defer logits have in common."""

from lowtide.core.checks import check_workspace
from lowtide.deferred import Deferral


class DeferralCallback:
    """Hold a callback's deferral, and report its counts, also after the deferral has ended."""

    deferral: Deferral | None = None

    def __init__(self, workspace: int | None) -> None:
        check_workspace(workspace)
        self.workspace = workspace

    @property
    def fused(self) -> int:
        """Return the number of losses computed without logits."""
        return 0 if self.deferral is None else self.deferral.fused

    @property
    def materialized(self) -> dict[str, int]:
        """Return for each operation how often it materialised the logits."""
        return {} if self.deferral is None else dict(self.deferral.materialized)

    def _undo(self) -> None:
        if self.deferral is not None:
            self.deferral.undo()
