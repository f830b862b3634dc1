import inspect

import lowtide
from lowtide import linear_cross_entropy as package_or_function


def test_names():
    assert lowtide.__all__ == ["LinearCrossEntropyLoss", "linear_cross_entropy"]
    assert all(hasattr(lowtide, name) for name in lowtide.__all__)
    assert callable(package_or_function), "the function, not the package of the same name"
    assert lowtide.__version__.count(".") == 2


def test_signature():
    signature = inspect.signature(lowtide.linear_cross_entropy)
    positional = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    options = {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert positional == ["input", "linear_weight", "target"]
    assert options == {
        "linear_bias": None,
        "weight": None,
        "reduction": "mean",
        "ignore_index": None,
        "label_smoothing": 0.0,
        "workspace": None,
        "backend": "auto",
    }
