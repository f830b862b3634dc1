"""Record the memory of a decoder's last stage over time, eager against lowtide.

The stage is norm, head and loss of Llama 3 8B's shape, a few steps forward and backward, as seen by
the allocator. Measuring writes a CSV, and drawing reads it: a row for each visible change of the
bytes held.

Shapes: B sequences, T tokens of each, D features, V classes.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import linear_cross_entropy
from lowtide.tools import figures, files
from lowtide.tools.eager import eager_loss
from lowtide.tools.environment import ENVIRONMENT, Environment
from lowtide.tools.errors import UserError
from lowtide.tools.profile.record import recording
from lowtide.tools.profile.timeline import Timeline, plot, timeline
from lowtide.tools.units import unit_of

STEPS = 3
OUT_OF_MEMORY = "out of memory"
SETTING = ("batch", "length", "features", "classes", "dtype")
COLUMNS = (*ENVIRONMENT, *SETTING)
OWN = ("provider", "end", "ms", "bytes")


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    features: int
    classes: int


SHAPES = (Shape(1, 32_768, 4096, 128_256), Shape(4, 20_480, 4096, 128_256))
SMOKE = (Shape(1, 128, 32, 2048), Shape(4, 64, 32, 2048))


LOSSES: dict[str, Loss] = {"eager": eager_loss, "lowtide": linear_cross_entropy}


@dataclass(frozen=True)
class Line:
    shape: Shape
    provider: str
    end: str  # "", or why it ended early.
    timeline: Timeline


def measure(shapes: Iterable[Shape], device: str) -> Iterator[Line]:
    """Yield the recorded lines: all that the allocator holds, on the CPU beyond the inputs."""
    for shape in shapes:
        for provider, loss in LOSSES.items():
            end, found = _record(_step(shape, loss, device), device)
            if device == "cuda":
                torch.cuda.empty_cache()
            yield Line(shape, provider, end, found)


def _step(shape: Shape, loss: Loss, device: str) -> Callable[[], None]:
    on: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    norm = nn.RMSNorm(shape.features, **on)
    weight_VD = torch.randn(shape.classes, shape.features, **on).mul_(shape.features**-0.5).requires_grad_()
    hidden_BTD = torch.randn(shape.batch, shape.length, shape.features, **on).requires_grad_()
    target_BT = torch.randint(shape.classes, (shape.batch, shape.length), device=device)

    def step() -> None:
        loss(norm(hidden_BTD), weight_VD, target_BT).backward()
        hidden_BTD.grad = weight_VD.grad = norm.weight.grad = None

    return step


def _record(step: Callable[[], None], device: str) -> tuple[str, Timeline]:
    end = ""
    try:
        step()  # The first step compiles and tunes.
    except torch.OutOfMemoryError:
        end = OUT_OF_MEMORY
    with recording(device) as record:
        try:
            for _ in range(1 if end else STEPS):
                step()
        except torch.OutOfMemoryError:
            end = OUT_OF_MEMORY
    return end, timeline(record.snapshot).thinned()


def write(lines: Iterable[Line], path: Path, device: str) -> None:
    environment = asdict(Environment.of(device))
    with files.growing_table(path, (*COLUMNS, *OWN)) as add:
        for line in lines:
            about = environment | asdict(line.shape) | {"dtype": "bfloat16"}
            for ms, held in zip(line.timeline.ms, line.timeline.bytes):
                own = (line.provider, line.end, f"{ms:.3f}", held)
                add(about | dict(zip(OWN, own)))


def read(path: Path) -> list[Line]:
    """Return the lines of such a CSV; raise a UserError if it is not one."""
    lines: dict[tuple[Shape, str], Line] = {}
    try:
        for row in files.read_table(path, (*SETTING, *OWN), "lowtide bench memory-timeline"):
            shape = Shape(*(int(row[name]) for name in ("batch", "length", "features", "classes")))
            fresh = Line(shape, row["provider"], row["end"], Timeline([], []))
            line = lines.setdefault((shape, row["provider"]), fresh)
            ms, held = float(row["ms"]), int(row["bytes"])
            if not (0 <= ms < math.inf and held >= 0):
                raise ValueError(f"{ms} ms and {held} bytes are out of range")
            line.timeline.ms.append(ms)
            line.timeline.bytes.append(held)
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from problem
    return list(lines.values())


def draw(lines: list[Line], path: Path) -> None:
    """Draw a panel for each shape, on one scale of bytes, from zero."""
    top = max(line.timeline.peak for line in lines)
    unit, name = unit_of(top)
    shapes = list(dict.fromkeys(line.shape for line in lines))
    with figures.figure(10, 4.2) as figure:
        panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)
        for axes, shape in zip(panels.flat, shapes):
            for line in lines:
                if line.shape == shape:
                    label = f"{line.provider}, {line.end}" if line.end else line.provider
                    plot(axes, label, line.timeline, unit, name, figures.COLORS.get(line.provider))
            tokens = f"[B, T] = [{shape.batch}, {shape.length:,}]"
            axes.set(title=tokens, xlabel=f"ms, {STEPS} steps forward and backward")
            axes.set_ylim(0, 1.05 * top / unit)
            figures.names_above(axes)
        panels.flat[0].set_ylabel(name)
        figures.save(figure, path)
