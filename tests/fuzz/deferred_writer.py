"""Writes a program line by line, and runs it on the model as it is: each line knows its shapes."""

from collections.abc import Sequence
from typing import Any

from tests.fuzz.deferred_program import NAMES, Line, Program, Run
from tests.fuzz.draw import Draw

FLOATS = tuple(NAMES)


class Writer:
    """What the generators of lines ask."""

    def __init__(self, draw: Draw, program: Program) -> None:
        self.draw, self.program = draw, program
        self.run = Run(program, "plain", "cpu")  # where a wrong index is an error that can be caught
        self.operands = 0
        self.error: Exception | None = None

    @property
    def z(self) -> Any:
        return self.run.names["z"]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.z.shape)

    @property
    def last(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def certain(self) -> bool:
        """Whether a rounding can hardly change the sign of a number, or which of two is larger."""
        return self.program.dtype == "f64" and self.program.around[:8] != "autocast"

    def write(self, text: str, kind: str = "") -> None:
        """A line; the first that torch refuses is the last."""
        line = Line(text, kind)
        self.program.lines.append(line)
        try:
            self.run.line(line)
        except Exception as error:
            self.error = error

    # Generators of expressions draw from these.

    def choice(self, choices: Sequence[Any]) -> Any:
        return self.draw.choice(choices)

    def dim(self, *, wrong: float = 0.03) -> int:
        rank = len(self.shape)
        if not rank or self.draw.chance(wrong):
            return self.choice((rank, -rank - 1, rank + 2, 7))
        return self.draw.randrange(-rank, rank)

    def dims(self) -> tuple[int, ...]:
        rank = len(self.shape)
        order = self.draw.sample(range(rank), self.draw.randint(min(1, rank), rank))
        return tuple(dim - rank if self.draw.chance(0.3) else dim for dim in order)

    def new(self, shape: Sequence[int], dtype: str | None = None, learned: bool | None = None) -> str:
        """A new operand's name, made by a line of its own."""
        k, self.operands = self.operands, self.operands + 1
        own = self.choice((self.program.dtype, self.program.dtype, *FLOATS)) if dtype is None else dtype
        wanted = self.draw.chance(0.3) if learned is None else learned
        sizes = "".join(f"{size}, " for size in shape)
        if own in NAMES:
            more = ", learned=True" if wanted else ""
            self.write(f'a{k} = t({k}, {sizes}dtype="{own}"{more})')
        else:
            high, _, kind = own.rpartition(" ")
            self.write(f"a{k} = t({k}, {sizes}dtype={kind}{f', high={high}' if high else ''})")
        return f"a{k}"

    def beside(self, dtype: str | None = None) -> str:
        """A tensor to broadcast with the logits: 0-d, of classes, of rows, one as large, ..."""
        shape = self.shape
        sizes = [1 if self.draw.chance(0.4) else size for size in shape]
        shapes = [(), (1,), (self.last,), (*shape[:-1], 1), shape, tuple(sizes), tuple(sizes[1:])]
        drawn = self.choice([*shapes, (), (self.last,), (1,) * (len(shape) + 1), (2, *shape)])
        return self.new(drawn, dtype)

    def index(self, size: int) -> str:
        """One index of one dimension, of any kind that torch has."""
        if not size:
            return self.choice((":", "1:", "None"))
        at = self.draw.randrange(-size, size)
        some = [self.draw.randrange(-size, size) for _ in range(self.draw.randint(1, 3))]
        start, stop = sorted(self.draw.randrange(-size - 1, size + 2) for _ in range(2))
        kinds = [":", str(at), f"{start}:{stop}", f":{stop}", f"{start}:", f"::{self.draw.randint(1, 3)}"]
        kinds += [f"{at}:", ":-1", "1:", str(some), f"torch.tensor({some}, device=device)", "None"]
        if self.draw.chance(0.25):
            kinds = [f"[{some}, {some}]", f"torch.tensor([{some}, {some}], device=device)", str(size), "-9"]
            kinds += ["True", "[]", "::-1", "torch.tensor(0)", "slice(None, None, 2)"]
        if self.draw.chance(0.2):
            return self.new((size,), "b8")
        return self.choice(kinds)
