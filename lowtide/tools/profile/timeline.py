"""Compute the bytes held over time from a snapshot of the allocator, and draw them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.tools import figures
from lowtide.tools.units import unit_of

FINENESS = 1000  # A change of less than the peak / FINENESS is not drawn.


@dataclass(frozen=True)
class Timeline:
    """Hold, for one device, milliseconds since the first event and bytes held after each event."""

    ms: list[float]
    bytes: list[int]

    @property
    def peak(self) -> int:
        return max(self.bytes, default=0)

    def thinned(self) -> "Timeline":
        """Return the changes that can be seen, and the peak."""
        # Taken once: finding the peak of many events takes as long as all else.
        peak, kept = self.peak, [0]
        least = peak / FINENESS
        for place in range(1, len(self.bytes) - 1):
            seen = abs(self.bytes[place] - self.bytes[kept[-1]]) >= least
            if seen or (self.bytes[place] == peak and self.bytes[kept[-1]] != peak):
                kept.append(place)
        kept = sorted({*kept, len(self.bytes) - 1}) if self.bytes else []
        return Timeline([self.ms[place] for place in kept], [self.bytes[place] for place in kept])


def timeline(snapshot: dict[str, Any], device: int = 0) -> Timeline:
    """Return the timeline of a device.

    On CUDA it includes what was held before the first event; on the CPU it counts from there.
    """
    trace = snapshot["device_traces"][device]
    changes = []
    for event in trace:
        if event["action"] == "alloc":
            changes.append((event["time_us"], event["size"]))
        elif event["action"] == "free_completed":
            changes.append((event["time_us"], -event["size"]))
    if not changes:
        return Timeline([], [])
    active = sum(
        block["requested_size"]  # Events count the requested size, too.
        for segment in snapshot["segments"]
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"].startswith("active")
    )
    held = active - sum(change for _, change in changes)
    start = changes[0][0]
    ms, levels = [0.0], [held]
    for time_us, change in changes:
        held += change
        ms.append((time_us - start) / 1000)
        levels.append(held)
    return Timeline(ms, levels)


def draw(label: str, line: Timeline, title: str, path: Path) -> None:
    """Draw the line of this name, eager and lowtide in their colours, and write its peak."""
    unit, name = unit_of(line.peak)
    with figures.figure(10, 4.2) as figure:
        axes = figure.subplots()
        plot(axes, label, line, unit, name)
        axes.set(title=title, xlabel="ms", ylabel=name)
        figures.names_above(axes)
        axes.set_ylim(0, 1.05 * line.peak / unit)
        figures.save(figure, path)


def plot(axes: Any, label: str, line: Timeline, unit: int, name: str, color: str | None = None) -> None:
    color = color or figures.COLORS.get(label, figures.INK)
    thin = line.thinned()
    levels = [each / unit for each in thin.bytes]
    axes.fill_between(thin.ms, levels, step="post", color=color, alpha=0.25, linewidth=0)
    text = f"{label}  {thin.peak / unit:,.1f} {name}"
    axes.step(thin.ms, levels, where="post", color=color, linewidth=1.2, label=text)
