"""Define the counts that every callback with deferred logits offers."""

from lowtide.deferred import Deferral


class DeferralCounts:
    """Report the counts of a callback's deferral, while it is active and after its end."""

    deferral: Deferral | None = None

    @property
    def fused(self) -> int:
        """Return the number of losses computed without logits."""
        return 0 if self.deferral is None else self.deferral.fused

    @property
    def materialized(self) -> dict[str, int]:
        """Return how often each operation materialised the logits."""
        return {} if self.deferral is None else dict(self.deferral.materialized)
