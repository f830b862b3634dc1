"""Tell a call from its rehearsal, in which a first call on a card finds out what it launches."""

import importlib.util


def in_rehearsal() -> bool:
    if importlib.util.find_spec("triton") is None:  # nothing to be compiled
        return False
    from lowtide.core.compile_ahead import launches

    return launches.in_rehearsal()
