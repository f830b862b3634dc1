"""Lines that change the shape of logits, or take some. Each is the right side of `z = ...`."""

import math

from tests.fuzz.deferred_numbers import Entry
from tests.fuzz.deferred_writer import Writer


def regrouped(w: Writer) -> str:
    """Another shape of as many elements; a few of fewer."""
    shape = list(w.shape)
    numbers = math.prod(shape)
    options = [[-1], [1, *shape], [*shape, 1], [numbers], [-1, w.last], [w.last, -1]]
    if len(shape) > 1:
        at = w.draw.randrange(len(shape) - 1)
        options += 3 * [[*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]]
        options += [shape[::-1], [-1, *shape[1:]], [*shape[:-2], -1]]
    if w.draw.chance(0.05):
        options = [[-1, -1], [numbers + 1], [0, -1], [-2]]
    return ", ".join(map(str, w.choice(options)))


def indexed(w: Writer) -> str:
    shape, parts = list(w.shape), []
    for size in shape[: w.draw.randint(1, max(len(shape), 1))]:
        parts.append(w.index(size))
    if w.draw.chance(0.3):
        parts = ["...", *parts[-1:]] if w.draw.chance(0.5) else [*parts[:1], "...", w.index(w.last)]
    if w.draw.chance(0.03):
        parts += [":"] * 6
    return ", ".join(parts)


def sections(w: Writer, dim: int) -> str:
    rank = len(w.shape)
    size = w.shape[dim] if -rank <= dim < rank else 3
    cut = w.draw.randint(0, size)
    return w.choice((str(w.draw.randint(1, 3)), f"[{cut}, {size - cut}]"))


def split(w: Writer) -> str:
    dim = w.dim()
    way = w.choice(("split", "chunk", "tensor_split", "unbind"))
    if way == "unbind":
        return f"z.unbind({dim})[{w.choice((0, -1))}]"
    count = sections(w, dim) if way == "split" else str(w.draw.randint(1, 3))
    return f"{w.choice((f'z.{way}(', f'torch.{way}(z, '))}{count}, {dim})[{w.choice((0, -1))}]"


def narrowed(w: Writer) -> str:
    dim, rank = w.dim(), len(w.shape)
    size = w.shape[dim] if -rank <= dim < rank else 3
    start = w.draw.randint(-size - (w.draw.chance(0.1)), size)
    length = w.draw.randint(0, max(size - start % max(size, 1), 0) + w.draw.chance(0.1))
    return f"{w.choice(('z.narrow(', 'torch.narrow(z, '))}{dim}, {start}, {length})"


def inner(w: Writer, dim: int) -> int:
    return w.shape[dim] if -len(w.shape) <= dim < len(w.shape) else 1


def selected(w: Writer) -> str:
    dim = w.dim()
    size = max(inner(w, dim), 1)
    some = [w.draw.randrange(size) for _ in range(3)]
    return w.choice(
        (
            f"z.select({dim}, {w.draw.randrange(-size, size + (w.draw.chance(0.1)))})",
            f"z.index_select({dim}, torch.tensor({some}, device=device))",
            f"torch.take_along_dim(z, z.argmax({dim}, keepdim=True), {dim})" if w.certain else "z[:0]",
            f"z.masked_select({w.new(w.shape, 'b8')})",
            f"z[{w.new(w.shape, 'b8')}]",
        )
    )


SHAPES: list[Entry] = [
    lambda w: f"z.view({regrouped(w)})",
    lambda w: f"z.reshape({regrouped(w)})",
    lambda w: f"torch.reshape(z, ({regrouped(w)},))",
    lambda w: f"z.flatten({w.choice(('', '0, 1', '0, -2', '-2', '1', '-2, -1', f'{w.dim()}, {w.dim()}'))})",
    lambda w: f"z.unflatten({w.dim()}, ({w.choice(('1, -1', '-1, 1', '2, -1', '-1'))},))",
    lambda w: f"z.squeeze({w.choice(('', str(w.dim())))})",
    lambda w: f"z.unsqueeze({w.draw.randint(-len(w.shape) - 1, len(w.shape))})",
    lambda w: f"z.transpose({w.dim()}, {w.dim()})",
    lambda w: f"torch.{w.choice(('transpose', 'swapaxes', 'movedim'))}(z, {w.dim()}, {w.dim()})",
    lambda w: f"z.permute({', '.join(map(str, w.draw.sample(range(len(w.shape)), len(w.shape))))})",
    lambda w: w.choice(("z.mT", "z.T", "z.t()", "z.adjoint()")),
    lambda w: f"z.expand({w.choice(('2, ', ''))}{', '.join(map(str, w.shape))})",
    lambda w: f"z.repeat({', '.join(['2'] * max(len(w.shape), 1))})",
    lambda w: f"z.flip({w.dim()})",
    lambda w: f"z.roll(1, {w.dim()})",
    lambda w: f"z.diagonal(0, {w.dim()}, {w.dim()})",
    narrowed,
    selected,
    split,
    *(4 * [lambda w: f"z[{indexed(w)}]"]),
    lambda w: "z[..., :-1, :]",
    lambda w: "z[:, :-1].contiguous()",
    lambda w: f"z[..., : {w.draw.randint(0, w.last + 1)}]",
    lambda w: f"z[[{w.choice(('0, -1', '0', '[0], [0]', '[0, 0], [0, -1]'))}]]",
]

JOINED: list[Entry] = [
    lambda w: f"torch.stack([z, z], {w.dim()})",
    lambda w: f"torch.cat([z, {w.choice(('z', '2 * z', w.new(w.shape, w.program.dtype)))}], {w.dim()})",
    lambda w: "torch.stack(list(z))",
    lambda w: "torch.stack([row * 2 for row in z])",
    lambda w: "torch.cat([u for u in z.split(1)])",
    lambda w: f'torch.einsum("...v,v->...v", z, {w.new((w.last,), w.program.dtype)})',
    lambda w: f"z @ {w.new((w.last, 3), w.program.dtype)}",
    lambda w: f"torch.matmul(z, {w.new((w.last,), w.program.dtype)})[..., None]",
    lambda w: f"F.linear(z, {w.new((3, w.last), w.program.dtype)})",
    lambda w: f"F.pad(z, ({w.choice(('1, 1', '0, 1', '-1, 0'))}))",
    lambda w: "torch.broadcast_tensors(z, z[..., :1])[0]",
    lambda w: "torch.nn.utils.rnn.pad_sequence(list(z))",
]
