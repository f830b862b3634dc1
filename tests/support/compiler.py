"""Leave out what `torch.compile` does for reports that no test reads, and a collection of garbage.

For each graph torch empties the processor's caches, which takes 20 ms, and measures how long the
guards take. For each break of a graph it describes the calls above, which below pytest are sixty.
"""

from traceback import StackSummary

from torch._dynamo import config, exc, guards


def leave_out_reports() -> None:
    """Let no time of guards, and no calls above the compiled one, be told."""
    guards.profile_guard_manager = lambda *arguments: 0.0
    exc._extract_stack_with_positions = StackSummary
    if hasattr(config, "run_gc_after_compile"):
        config.run_gc_after_compile = False
