"""Leave out what `torch.compile` does for a statistic alone.

For each graph torch measures once how long its guards take. Before that it empties the processor's
caches, which takes 20 ms.
"""

from torch._dynamo import guards


def leave_out_times_of_guards() -> None:
    """Let the time of each graph's guards be told as 0."""
    guards.profile_guard_manager = lambda *arguments: 0.0
