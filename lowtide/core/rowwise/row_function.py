"""Compute a function of rows chunk by chunk, differentiable to any order.

A rowwise function takes tensors that are cut along their first dimension ("rows") and tensors that
every chunk uses as a whole. It returns results of rows, one after the other, and sums over all
rows. Its vector-Jacobian product is rowwise again: the gradient of a row is a result of that row,
and the gradient of a whole tensor is a sum over rows. The same holds for its Jacobian-vector
product. So each derivative is computed chunk by chunk like the function itself, and nothing of a
chunk is kept when the next one begins: the memory is that of one chunk. This works under every
torch.func transform and in forward mode.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.autodiff import scatter_gradients
from lowtide.core.rowwise.variables import (
    Both,
    Tensors,
    at,
    filled,
    grad,
    is_continuous,
    jacobian_vector,
    split,
    vector_jacobian,
    with_variables,
)


class RowDerivative(NamedTuple):
    """Describe a derivative of a rowwise function, which is rowwise again."""

    derive: Callable[[Tensors, Tensors, Tensors, bool], Tensors]
    """vector_jacobian or jacobian_vector."""
    inputs: Sequence[int]
    """The places of the function's arguments that take part."""
    outputs: Sequence[int]
    """The places of the function's outputs that take part."""
    results: int
    """The number of the derivative's outputs that are results of rows; the others are sums."""


class RowFunction:
    """Make a rowwise function differentiable, given `run` and `derivative`."""

    cut: int
    """Number of arguments that are cut into chunks; they come first."""
    results: int
    """Number of outputs that are results of rows; they come first."""
    constants: int = 0
    """Number of outputs that are not differentiated; they come last."""

    def __call__(self, *tensors: Tensor) -> Tensors:
        return _evaluate(self, tensors)

    def run(self, *tensors: Tensor) -> Tensors:
        """Compute the outputs: the results of rows, then the sums, then the constants."""
        raise NotImplementedError

    def derivative(self, described: RowDerivative, given_rows: int, given_whole: int) -> "RowFunction":
        """Return the function that computes this derivative.

        Its arguments are this function's and gradients or tangents: `given_rows` of these follow
        the arguments that are cut, and `given_whole` follow the arguments that are whole.
        """
        raise NotImplementedError

    def pull_back(
        self, tensors: Tensors, grad_output: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Return the needed gradients of `tensors`, in a form that can be differentiated."""
        given = {place: gradient for place, gradient in enumerate(grad_output) if gradient is not None}
        wanted = [place for place, need in enumerate(needed) if need]
        if not given or not wanted:
            return (None,) * len(tensors)
        results = sum(place < self.cut for place in wanted)
        described = RowDerivative(vector_jacobian, wanted, list(given), results)
        return scatter_gradients(self._evaluated(described, tensors, given, self.results), needed)

    def push_forward(
        self, tensors: Tensors, tangents: Sequence[Tensor | None], outputs: Sequence[int]
    ) -> Tensors:
        """Return the tangents of the outputs at these places; they can be differentiated."""
        given = {place: tangent for place, tangent in enumerate(tangents) if tangent is not None}
        results = sum(place < self.results for place in outputs)
        described = RowDerivative(jacobian_vector, list(given), outputs, results)
        return self._evaluated(described, tensors, given, self.cut)

    def _evaluated(
        self, described: RowDerivative, tensors: Tensors, given: dict[int, Tensor], boundary: int
    ) -> Tensors:
        """Compute a derivative; the tensors given at places before `boundary` are cut in chunks."""
        given_rows = [tensor for place, tensor in given.items() if place < boundary]
        given_whole = [tensor for place, tensor in given.items() if place >= boundary]
        derivative = self.derivative(described, len(given_rows), len(given_whole))
        return derivative(*tensors[: self.cut], *given_rows, *tensors[self.cut :], *given_whole)


class Rowwise(RowFunction):
    """Evaluate a pure function of torch operations and its derivatives, chunk by chunk."""

    def __init__(
        self, function: Callable[[Tensors, Tensors], Both], cut: int, results: int, chunk: int
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

    def derivative(self, described: RowDerivative, given_rows: int, given_whole: int) -> "Rowwise":
        def function(rows: Tensors, whole: Tensors) -> Both:
            whole, last = split(whole, len(whole) - given_whole)
            given, create_graph = (*rows[self.cut :], *last), torch.is_grad_enabled()
            with torch.enable_grad():
                own, varied = with_variables((*rows[: self.cut], *whole), described.inputs)
                # Free the outputs that take no part.
                outputs = at(described.outputs, sum(self.function(*split(own, self.cut)), ()))
                found = described.derive(outputs, varied, given, create_graph)
                return split(found, described.results)

        # A derivative holds about twice as much per row.
        return Rowwise(function, self.cut + given_rows, described.results, max(1, self.chunk // 2))


class OfProducts(Rowwise):
    """Evaluate a rowwise function of products, with more rows in a product than in a chunk.

    A product of few rows waits for its weight, and each adds a gradient to the sum for the whole
    weight. The other operations may hold many numbers for each one of a product. So products are
    computed for a block of rows, and the other operations for one chunk of the block at a time.
    """

    def __init__(
        self,
        products: Callable[[Tensors, Tensors], Tensors],
        count: int,
        weights: int,
        rest: Rowwise,
        block: int,
    ) -> None:
        """Hold the products and the rest.

        `products` maps the first `count` arguments that are cut, and the first `weights` that are
        whole, to `count` products. `rest` is a function of these, which are cut, and of all other
        arguments. `block` is the number of rows of a product.
        """

        # These do not refer to self: such a cycle would live until Python looks for cycles.
        def arguments(rows: Tensors, whole: Tensors) -> Tensors:
            return (*products(rows[:count], whole[:weights]), *rows[count:], *whole[weights:])

        def of_block(rows: Tensors, whole: Tensors) -> Both:
            return split(rest(*arguments(rows, whole)), rest.results)

        self.arguments_of_rest, self.count, self.rest = arguments, count, rest
        super().__init__(of_block, rest.cut, rest.results, block)

    def derivative(self, described: RowDerivative, given_rows: int, given_whole: int) -> Rowwise:
        if described.derive is not vector_jacobian:
            return super().derivative(described, given_rows, given_whole)

        def function(rows: Tensors, whole: Tensors) -> Both:
            whole, last = split(whole, len(whole) - given_whole)
            upstream = dict(zip(described.outputs, (*rows[self.cut :], *last)))
            outputs = [upstream.get(place) for place in range(max(upstream) + 1)]
            create_graph = torch.is_grad_enabled()
            with torch.enable_grad():
                own, varied = with_variables((*rows[: self.cut], *whole), described.inputs)
                arguments = self.arguments_of_rest(*split(own, self.cut))
            products, direct = arguments[: self.count], set(map(id, varied))
            through = {id(each) for each in products if each.requires_grad}
            needed = [id(each) in direct | through for each in arguments]
            with torch.set_grad_enabled(create_graph):
                gradients = self.rest.pull_back(arguments, outputs, needed)
            known = {id(each): own for each, own in zip(arguments, gradients) if own is not None}
            passing = tuple(each for each in products if id(each) in known)
            others = grad(passing, varied, tuple(known[id(each)] for each in passing), create_graph)
            found = [known.get(id(each), other) for each, other in zip(varied, others)]
            return split(filled(found, varied), described.results)

        # A block of this size gives products of the same bits.
        return Rowwise(function, self.cut + given_rows, described.results, self.chunk)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(rowwise: RowFunction, *tensors: Tensor) -> Tensors:
        return rowwise.run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        ctx.rowwise, *tensors = inputs
        ctx.count = len(output)
        differentiable = output[: len(output) - ctx.rowwise.constants]
        ctx.outputs = [place for place, out in enumerate(differentiable) if is_continuous(out)]
        ctx.mark_non_differentiable(*(out for k, out in enumerate(output) if k not in ctx.outputs))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.rowwise.pull_back(ctx.saved_tensors, grad_output, ctx.needs_input_grad[1:]))

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.rowwise.push_forward(ctx.saved_tensors, tangents, ctx.outputs)
        return scatter_gradients(found, [place in ctx.outputs for place in range(ctx.count)])

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, rowwise: RowFunction, *tensors: Tensor
    ) -> tuple[Tensors, tuple[int, ...]]:
        outputs = _by_element(rowwise, info.batch_size, tensors, in_dims[1:])
        return outputs, (0,) * len(outputs)


@torch_private.never_compiled(
    "lowtide computes gradients of class probabilities and class weights, derivatives of higher order "
    "and functions of deferred logits chunk by chunk, eagerly: compile the step without fullgraph=True, or "
    "detach what needs no gradient"
)
def _evaluate(rowwise: RowFunction, tensors: Tensors) -> Tensors:
    """Compute the function, for a batch of is_grads_batched=True one element after the other.

    Autograd gives such a batch no graph in an autograd function, but its elements have one.
    """
    batched = [torch_private.is_legacy_batched(each) for each in tensors]
    if not any(batched):
        outputs: Tensors = _Apply.apply(rowwise, *tensors)
        return outputs
    level, parts, dims = torch_private.without_legacy_batch(tensors, batched)
    size = next(len(part) for part, dim in zip(parts, dims) if dim is not None)
    outputs = _by_element(rowwise, size, tuple(parts), dims)
    return tuple(torch_private.as_legacy_batch(each, 0, level) for each in outputs)


def _by_element(rowwise: RowFunction, size: int, tensors: Tensors, dims: Sequence[int | None]) -> Tensors:
    """Compute one element of a batch after the other: memory must not grow with the batch.

    A dimension of None is that of a tensor which all elements share. The outputs' first dimension
    is that of the batch.
    """
    batch = list(zip(tensors, dims))
    if size == 0:  # The outputs' shapes come from an element on the meta device.
        one = (
            each if dim is None else each.new_empty((*each.shape[:dim], *each.shape[dim + 1 :]))
            for each, dim in batch
        )
        like = rowwise(*(each.to("meta") for each in one))
        return tuple(torch.empty(0, *each.shape, dtype=each.dtype, device=tensors[0].device) for each in like)

    def call(element: int) -> Tensors:
        return rowwise(*(each if dim is None else each.select(dim, element) for each, dim in batch))

    calls = zip(*map(call, range(size)))
    return tuple(torch.stack(each) for each in calls)


def _first(term: Tensor, *, alone: bool) -> Tensor:
    """Return the first term of a sum in memory of its own.

    A half-precision sum is accumulated in float32, since adding many terms loses more digits than
    one rounding. `alone` says that there is only one term.
    """
    half = term.is_floating_point() and term.dtype.itemsize < 4 and not alone
    own = term.clone(memory_format=torch.contiguous_format)
    return own.float() if half else own
