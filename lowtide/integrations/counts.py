"""Share what every callback that defers logits tells."""

from lowtide.deferred import Deferral


class DeferralCounts:
    """Counts of a callback's deferral, while it is at work and after its end."""

    deferral: Deferral | None = None

    @property
    def fused(self) -> int:
        """Return how many losses have been computed without logits."""
        return 0 if self.deferral is None else self.deferral.fused

    @property
    def materialized(self) -> dict[str, int]:
        """Return how often each operation made real logits."""
        return {} if self.deferral is None else dict(self.deferral.materialized)
