"""Record what a chunk is computed from; raise if this has changed when it is computed again."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.errors import ArgumentError
from lowtide.ops.chunked_loss.functional.constants import constants
from lowtide.ops.chunked_loss.functional.tensors import ROW, Functional, is_plain


class Snapshot:
    """Hold the state that the functions and the tensors that are cut have when the call begins.

    The state is the versions of tensors, parameters and buffers, the modules' training modes, and
    the constants that the code reaches. `rows` are the tensors that are cut, by name.
    """

    def __init__(
        self, functional: Functional, rows: Mapping[str, Tensor], constants: dict[str, Any] | None = None
    ) -> None:
        self.functional = functional
        self.state = self._state(rows)
        self.constants = self._constants() if constants is None else constants

    def changed(self, rows: Mapping[str, Tensor] | None = None) -> list[str]:
        """Return the names of tensors and training modes that have changed.

        Without `rows`, the tensors that are cut are not compared. In backward, autograd compares
        the versions of these tensors itself.
        """
        return _differing(self.state, self._state(rows or {}))

    def check(self) -> None:
        """Raise if a tensor, a training mode or a constant has changed."""
        check_none([*self.changed(), *_differing(self.constants, self._constants())])

    def settle(self) -> None:
        """Forget constants that the functions' own code has changed, such as a counter."""
        now = self._constants()
        self.constants = {key: was for key, was in self.constants.items() if key in now and now[key] == was}

    def _state(self, rows: Mapping[str, Tensor]) -> dict[str, Any]:
        functional = self.functional
        state: dict[str, Any] = {name: _version(row)[1] for name, row in rows.items()}
        state |= {name: _version(tensor) for name, tensor in functional.tensors.items()}
        state |= _buffers(functional)
        for prefix, module in functional.modules.items():
            state |= {f"{prefix}.{name}": _version(each) for name, each in module.named_parameters()}
            for name, each in module.named_modules():
                state[f"{prefix}.{name}".rstrip(".") + ".training"] = each.training
        # Learned tensors replace parameters by name, whatever the modules hold by then. So compare
        # the learned tensors.
        return state | {name: _version(each) for name, each in zip(functional.names, functional.learned)}

    def _constants(self) -> dict[str, Any]:
        functional = self.functional
        known = {id(tensor) for tensor in (*functional.learned, *functional.tensors.values())}
        for module in functional.modules.values():
            known |= {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        values = {
            f"token_tensors[{k}]": each for k, each in enumerate(functional.arguments) if each is not ROW
        }
        return constants({"head": functional.head, "loss_fn": functional.loss_fn, **values}, known)


def _buffers(functional: Functional) -> dict[str, tuple[int, int]]:
    """Return the versions of the modules' buffers, by name."""
    return {
        f"{path}.{name}": _version(buffer)
        for path, module in functional.parts
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


@contextlib.contextmanager
def unchanged(functional: Functional, learned: Sequence[Tensor]) -> Iterator[None]:
    """Raise if head or loss_fn change a buffer, or give a learned tensor other memory."""
    versions, places = _buffers(functional), _addresses(learned)
    yield
    changed = [name for name, version in _buffers(functional).items() if version != versions.get(name)]
    if changed:
        raise ArgumentError(
            f"head and loss_fn must not change buffers, but did: {', '.join(changed)}. Once a chunk is "
            "not once a step, and a row's result would depend on its chunk; put such a layer in eval mode or "
            "before the head"
        )
    compared = zip(functional.names, places, _addresses(learned))
    moved = [name for name, was, now in compared if was != now]
    if moved:
        raise ArgumentError(
            f"head and loss_fn must not assign to the .data of what they learn, but did: {', '.join(moved)}. "
            "A chunk runs on a copy, so the parameter would keep its old values: assign to it before the call"
        )


def _addresses(learned: Sequence[Tensor]) -> list[int]:
    """Return where the memory of each tensor begins; 0 for one that wraps others."""
    return [
        each.data_ptr() if is_plain(each) and not torch_private.is_wrapped(each) else 0 for each in learned
    ]


def check_none(changed: Sequence[str]) -> None:
    if changed:
        raise ArgumentError(
            "what the loss is computed from must not change until it is computed again, but did: "
            f"{', '.join(dict.fromkeys(changed))}. mode='recompute', derivatives of higher order and a "
            "workspace run head and loss_fn more than once: change a copy (labels = labels.clone()), or "
            "after backward; pass a number that follows a schedule as an argument after the labels; or use "
            "mode='gradient_in_forward'"
        )


def other_loss(was: float, now: float) -> ArgumentError:
    """Return the error for a chunk whose loss differs when it is computed again."""
    return ArgumentError(
        f"a chunk's loss must be the same when it is computed again, but was {was:.9g} and is {now:.9g}: "
        "head or loss_fn reads something that has changed since (a file, an iterator, random numbers of a "
        "generator of its own). Read it before the call and pass it as a token tensor, or use "
        "mode='gradient_in_forward'"
    )


def _version(tensor: Tensor) -> tuple[int, int]:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in after if name in before and after[name] != before[name]]
