"""Draw the sizes of random calls."""


def size(rng, most):
    """As often small as large."""
    return int(2 ** rng.uniform(0, most))
