import pytest


@pytest.fixture(autouse=True)
def _nothing_is_zero_by_luck():
    """Not here, where every allocation is counted."""
