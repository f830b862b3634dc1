"""Register formulas of FLOPs for torch.utils.flop_counter, without importing it.

That module imports Triton, which takes longer than all of lowtide. FlopCounterMode copies the
formulas when it is made, so they have to be registered as soon as the module is imported.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULE = "torch.utils.flop_counter"

_formulas: dict[Any, Callable[..., int]] = {}


def register_flop_formula(operator: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register the decorated function, which gets an operator's arguments, tensors as shapes."""

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas[operator] = formula
        if MODULE in sys.modules:
            sys.modules[MODULE].register_flop_formula(operator)(formula)
        return formula

    return register


class _WhenImported:
    """Add the formulas to the module as soon as it has been executed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None  # The next finder is asked.
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for operator, formula in _formulas.items():
                module.register_flop_formula(operator)(formula)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _WhenImported)
