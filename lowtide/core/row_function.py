"""Compute a function of rows chunk by chunk, differentiable to any order.

A rowwise function takes tensors that are cut along their first dimension ("rows") and tensors that
every chunk uses as a whole. It returns results of rows, one after the other, and sums over all
rows. Its vector-Jacobian product is rowwise again: the gradient of a row is a result of that row,
and the gradient of a whole tensor is a sum over rows. The same holds for its Jacobian-vector
product. So each derivative is computed chunk by chunk like the function itself, and nothing of a
chunk is kept when the next one begins: the memory is that of one chunk. It works under every
torch.func transform and in forward mode.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class RowFunction:
    """Make a rowwise function differentiable, given `run` and its two derivatives."""

    cut: int
    """Number of arguments that are cut into chunks; they come first."""
    results: int
    """Number of outputs that are results of rows; they come first."""
    constants: int = 0
    """Number of outputs that are not differentiated; they come last."""

    def __call__(self, *tensors: Tensor) -> Tensors:
        outputs: Tensors = _Apply.apply(self, *tensors)
        return outputs

    def run(self, *tensors: Tensor) -> Tensors:
        """Compute the outputs: the results of rows, then the sums, then the constants."""
        raise NotImplementedError

    def gradients(self, wanted: Sequence[int], grad_output: Sequence[int]) -> "RowFunction":
        """Return the function that computes the gradients of the arguments at places `wanted`.

        It takes the gradients of the outputs at places `grad_output`. Its arguments are those that
        are cut (this function's rows, then the gradients of its results), then those that are whole
        (this function's, then the gradients of its sums).
        """
        raise NotImplementedError

    def tangents(self, moved: Sequence[int], wanted: Sequence[int]) -> "RowFunction":
        """Return the function that computes the tangents of the outputs at places `wanted`.

        It takes the tangents of the arguments at places `moved`. Its arguments are those that are
        cut (this function's rows, then their tangents), then those that are whole, in that order.
        """
        raise NotImplementedError

    def pull_back(
        self, tensors: Tensors, grad_output: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `tensors` that are needed, so that they can be differentiated."""
        given = {place: gradient for place, gradient in enumerate(grad_output) if gradient is not None}
        wanted = [place for place, need in enumerate(needed) if need]
        gradients: list[Tensor | None] = [None] * len(tensors)
        if given and wanted:
            derivative = self.gradients(wanted, list(given))
            found = derivative(*self.arranged(tensors, given, self.results))
            for place, gradient in zip(wanted, found):
                gradients[place] = gradient
        return tuple(gradients)

    def arranged(self, own: Tensors, more: dict[int, Tensor], boundary: int) -> Tensors:
        """Return the arguments of a derivative in its order: `own` and, by place, `more`."""
        return (
            *own[: self.cut],
            *(tensor for place, tensor in more.items() if place < boundary),
            *own[self.cut :],
            *(tensor for place, tensor in more.items() if place >= boundary),
        )


class Rowwise(RowFunction):
    """Evaluate a pure function of torch operations chunk by chunk, and so its derivatives."""

    def __init__(
        self,
        function: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]],
        cut: int,
        results: int,
        chunk: int,
    ) -> None:
        """Hold the function and how its arguments are cut.

        `function` maps (rows, whole) to (results of rows, sums over rows). It is pure and made of
        differentiable torch operations. `chunk` is the number of rows at a time.
        """
        self.function, self.cut, self.results, self.chunk = function, cut, results, chunk

    def run(self, *tensors: Tensor) -> Tensors:
        rows, whole = tensors[: self.cut], tensors[self.cut :]
        N = rows[0].shape[0]
        results: list[Tensor] = []
        sums: list[Tensor] = []
        dtypes: list[torch.dtype] = []
        for start in range(0, max(N, 1), self.chunk):
            chunk = slice(start, start + self.chunk)
            parts, terms = self.function(tuple(row[chunk] for row in rows), whole)
            if start == 0:
                results = [part.new_empty(N, *part.shape[1:]) for part in parts]
                dtypes = [term.dtype for term in terms]
                sums = [_first(term, alone=self.chunk >= N) for term in terms]
            else:
                for total, term in zip(sums, terms):
                    total.add_(term)
            for result, part in zip(results, parts):
                result[chunk] = part
            del parts, terms  # free them before the next ones are made
        return (*results, *(total.to(dtype) for total, dtype in zip(sums, dtypes)))

    def gradients(self, wanted: Sequence[int], grad_output: Sequence[int]) -> "Rowwise":
        row_gradients = sum(place < self.results for place in grad_output)

        def function(rows: Tensors, whole: Tensors) -> tuple[Tensors, Tensors]:
            own_whole, sum_gradients = split(whole, len(whole) - len(grad_output) + row_gradients)
            given, create_graph = (*rows[self.cut :], *sum_gradients), torch.is_grad_enabled()
            with torch.enable_grad():
                own, varied = _varied((*rows[: self.cut], *own_whole), wanted)
                outputs = at(grad_output, self._outputs(own))
                return split(vector_jacobian(outputs, varied, given, create_graph), results)

        results = sum(place < self.cut for place in wanted)
        return Rowwise(function, self.cut + row_gradients, results, self._half())

    def tangents(self, moved: Sequence[int], wanted: Sequence[int]) -> "Rowwise":
        row_tangents = sum(place < self.cut for place in moved)

        def function(rows: Tensors, whole: Tensors) -> tuple[Tensors, Tensors]:
            own_whole, whole_tangents = split(whole, len(whole) - len(moved) + row_tangents)
            given, create_graph = (*rows[self.cut :], *whole_tangents), torch.is_grad_enabled()
            with torch.enable_grad():
                own, varied = _varied((*rows[: self.cut], *own_whole), moved)
                outputs = at(wanted, self._outputs(own))
                return split(jacobian_vector(outputs, varied, given, create_graph), results)

        results = sum(place < self.results for place in wanted)
        return Rowwise(function, self.cut + row_tangents, results, self._half())

    def _half(self) -> int:
        """Return the rows at a time of a derivative, which holds about twice as much per row."""
        return max(1, self.chunk // 2)

    def _outputs(self, arguments: Tensors) -> Tensors:
        results, sums = self.function(arguments[: self.cut], arguments[self.cut :])
        return (*results, *sums)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(rowwise: RowFunction, *tensors: Tensor) -> Tensors:
        return rowwise.run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        ctx.rowwise, *tensors = inputs
        ctx.count = len(output)
        differentiable = output[: len(output) - ctx.rowwise.constants]
        ctx.outputs = [place for place, out in enumerate(differentiable) if out.is_floating_point()]
        ctx.mark_non_differentiable(*(out for k, out in enumerate(output) if k not in ctx.outputs))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.rowwise.pull_back(ctx.saved_tensors, grad_output, ctx.needs_input_grad[1:]))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        rowwise, tensors = ctx.rowwise, ctx.saved_tensors
        moved = {place: tangent for place, tangent in enumerate(tangents) if tangent is not None}
        derivative = rowwise.tangents(list(moved), ctx.outputs)
        found = iter(derivative(*rowwise.arranged(tensors, moved, rowwise.cut)))
        return tuple(next(found) if place in ctx.outputs else None for place in range(ctx.count))

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, rowwise: RowFunction, *tensors: Tensor
    ) -> tuple[Tensors, tuple[int, ...]]:
        """Compute one element of the batch after the other: memory must not grow with the batch."""
        if info.batch_size == 0:  # no element from which to learn the outputs' shapes
            return _no_elements(rowwise, tensors, in_dims[1:])
        calls = [
            rowwise(
                *(
                    tensor if dim is None else tensor.select(dim, element)
                    for tensor, dim in zip(tensors, in_dims[1:])
                )
            )
            for element in range(info.batch_size)
        ]
        return tuple(torch.stack(outputs) for outputs in zip(*calls)), (0,) * len(calls[0])


def _first(term: Tensor, *, alone: bool) -> Tensor:
    """Return the first term of a sum in memory of its own.

    A half-precision sum is accumulated in float32, since adding many terms loses more digits than
    one rounding. `alone`: there is only one term.
    """
    half = term.is_floating_point() and term.dtype.itemsize < 4 and not alone
    own = term.clone(memory_format=torch.contiguous_format)
    return own.float() if half else own


def _no_elements(rowwise: RowFunction, tensors: Tensors, dims: Any) -> tuple[Tensors, tuple[int, ...]]:
    """Return an empty batch in the shapes that one element would give, found on the meta device."""
    one = (
        tensor if dim is None else tensor.new_empty((*tensor.shape[:dim], *tensor.shape[dim + 1 :]))
        for tensor, dim in zip(tensors, dims)
    )
    outputs = rowwise(*(tensor.to("meta") for tensor in one))
    device = tensors[0].device
    return tuple(torch.empty(0, *out.shape, dtype=out.dtype, device=device) for out in outputs), (0,) * len(
        outputs
    )


def as_variables(tensors: Tensors) -> Tensors:
    """Return these tensors as new variables to differentiate by, within the existing graph."""
    with torch.enable_grad():
        return tuple(
            tensor.view_as(tensor)
            if tensor.requires_grad
            else tensor.detach().requires_grad_(tensor.is_floating_point())
            for tensor in tensors
        )


def _varied(tensors: Tensors, places: Sequence[int]) -> tuple[Tensors, Tensors]:
    """Return the tensors with those at `places` replaced by new variables, and these variables."""
    varied = as_variables(at(places, tensors))
    by_place = dict(zip(places, varied))
    return tuple(by_place.get(place, tensor) for place, tensor in enumerate(tensors)), varied


def vector_jacobian(outputs: Tensors, inputs: Tensors, grad_output: Tensors, create_graph: bool) -> Tensors:
    """Return the gradients of the inputs, given those of the outputs.

    This uses torch.autograd, because the first use of torch.func imports Dynamo, which takes 2 s.
    """
    return _filled(_grad(outputs, inputs, grad_output, create_graph), inputs)


def jacobian_vector(outputs: Tensors, inputs: Tensors, moving: Tensors, create_graph: bool) -> Tensors:
    """Return the tangents of the outputs, given those of the inputs.

    The vector-Jacobian product is linear in the upstream gradients; its own vector-Jacobian product
    is the Jacobian-vector product. Forward mode is not used, since it does not nest and may be
    active.
    """
    seeds = tuple(torch.zeros_like(each).requires_grad_() for each in outputs)
    pulled = _grad(outputs, inputs, seeds, True)
    return _filled(_grad(pulled, seeds, moving, create_graph), seeds)


def _grad(
    outputs: Sequence[Tensor | None], inputs: Tensors, grad_output: Tensors, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """Return gradients, None for inputs on which no output depends.

    An output without a graph depends on none of them and is left out.
    """
    pairs = [
        (each, gradient.to(each.dtype))
        for each, gradient in zip(outputs, grad_output)
        if each is not None and each.requires_grad
    ]
    if not pairs:
        return (None,) * len(inputs)
    return torch.autograd.grad(
        [each for each, _ in pairs],
        inputs,
        [gradient for _, gradient in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )


def _filled(found: Sequence[Tensor | None], like: Tensors) -> Tensors:
    """Replace each None with zeros."""
    return tuple(torch.zeros_like(own) if each is None else each for each, own in zip(found, like))


def at(places: Sequence[int], tensors: Tensors) -> Tensors:
    """Return the tensors at these places."""
    return tuple(tensors[place] for place in places)


def split(tensors: Sequence[Tensor], place: int) -> tuple[Tensors, Tensors]:
    """Return the tensors before `place`, and those from it on."""
    return tuple(tensors[:place]), tuple(tensors[place:])
