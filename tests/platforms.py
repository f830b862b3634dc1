"""Compiles the kernels ahead of time for cards that are not there, and says what each card can run:

    python -m tests.platforms                         # every way on every architecture
    python -m tests.platforms --only sm_120 --way distillation

Each way is a line, and a row of docs/_data/builds.csv that replaces an earlier one as soon as it is
compiled; docs/_data/platforms.csv is made of these rows. All take half an hour of a processor.

A way is what runs a call: an engine of the loss, the kernels of attention or of distillation. Built
are the kernels that the way has on that architecture, with the tiles that it takes there by its
shared memory, less those builds that another covers (`LEFT_OUT` in each compile_kernels.py).
TRITON_INTERPRET must not be set.
"""

import argparse
import csv
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from tests.ops.attention.triton_backend import compile_kernels as attention
from tests.ops.distillation import compile_kernels as distillation
from tests.ops.linear_cross_entropy.engines import compile_kernels as loss

DATA = Path(__file__).parents[1] / "docs" / "_data"
KIB = 1 << 10


class Architecture(NamedTuple):
    target: int | str
    """As tests/support/ahead_of_time.py takes it."""
    cards: str
    shared: int
    """Bytes of shared memory that a block may have."""

    @property
    def name(self) -> str:
        return f"sm_{self.target}" if isinstance(self.target, int) else self.target

    @property
    def amd(self) -> bool:
        return isinstance(self.target, str)

    @property
    def like(self) -> int:
        """The capability whose builds are to be compiled: of a Hopper card, or of a small one."""
        return 90 if not self.amd and self.shared >= 227 * KIB else 80


ARCHITECTURES = (
    Architecture(80, "A100, A30", 163 * KIB),
    Architecture(86, "RTX 30, A10, A40", 99 * KIB),
    Architecture(89, "RTX 40, L4, L40S", 99 * KIB),
    Architecture(90, "H100, H200", 227 * KIB),
    Architecture(100, "B200", 227 * KIB),
    Architecture(103, "B300", 227 * KIB),
    Architecture(120, "RTX 50, RTX PRO 6000 Blackwell", 99 * KIB),
    Architecture("gfx942", "MI300X, MI325X", 64 * KIB),
    Architecture("gfx950", "MI350X, MI355X", 160 * KIB),
)
OVER_PRODUCTS = "1.6 to 3.4 times the products"
UNTRIED = "nobody has run it: lowtide doctor --selftest tells"
SIMULATED = "checked on a simulated device, never on a real one"
# Kernels of the loss that any card runs; the others are those of the engines for Hopper.
ANY_CARD = (
    "engines.logits",
    "core.kernels.triton_helpers",
    "row_kernels",
    "target_rows",
    "row_loss_triton",
    "row_results_triton",
)


class Way(NamedTuple):
    name: str
    module: Any
    """A compile_kernels.py."""
    takes: Callable[[Any, Architecture], bool]


def _of_any_card(build: Any, _: Architecture) -> bool:
    return any(part in build.module for part in ANY_CARD)


def _of_hopper(build: Any, architecture: Architecture) -> bool:
    return not _of_any_card(build, architecture) and architecture.target == 90


def _of_attention(_: Any, architecture: Architecture) -> bool:
    return not architecture.amd


WAYS = (
    Way("loss: logits_triton", loss, _of_any_card),
    Way("loss: exponentials, soft_targets", loss, _of_hopper),
    Way("distillation", distillation, lambda *_: True),
    Way("attention: triton", attention, _of_attention),
)
BUILDS = ("date", "commit", "triton", "architecture", "cards", "way", "builds", "registers", "spilled_bytes")
BUILDS += ("shared_bytes", "shared_limit", "failed")
PLATFORMS = ("platform", "architecture", "call", "way", "status", "expected")


def builds_of(way: Way, architecture: Architecture) -> list[str]:
    """The names of what is compiled for a way; none if it does not run there."""
    left_out = way.module.LEFT_OUT[architecture.like]
    return [
        name
        for name, build in way.module.BUILDS.items()
        if architecture.like in build.targets and name not in left_out and way.takes(build, architecture)
    ]


def compile_way(way: Way, architecture: Architecture) -> dict[str, object]:
    results, failed = [], []
    names = builds_of(way, architecture)
    for name in names:
        build = way.module.BUILDS[name]
        if architecture.amd:  # a program has at most 1,024 threads, and an AMD warp has 64
            build = build._replace(warps=min(build.warps, 16))
        try:
            result = way.module.resources(name, build, architecture.target)
        except Exception as error:  # Said in the table, so that one kernel does not hide the others.
            failed.append(f"{name}: {type(error).__name__}")
            continue
        results.append(result)
        if result["shared"] > architecture.shared:
            failed.append(f"{name}: {result['shared']} bytes of shared memory")
    return {
        "architecture": architecture.name,
        "cards": architecture.cards,
        "way": way.name,
        "builds": len(names),
        "registers": max((result["registers"] for result in results), default=0),
        "spilled_bytes": max((result["spill_stores"] for result in results), default=0),
        "shared_bytes": max((result["shared"] for result in results), default=0),
        "shared_limit": architecture.shared,
        "failed": "; ".join(failed),
    }


def platforms(rows: list[dict[str, object]]) -> Iterator[dict[str, str]]:
    """What a call takes on each platform, how far that was tried, and what to expect."""
    built = {(row["architecture"], row["way"]): not row["failed"] for row in rows}
    ways = {way.name: way for way in WAYS}
    losses = "loss, log-probabilities"
    for each in ARCHITECTURES:
        hopper = each.target == 90
        for call, way, fallback in (
            (losses, "loss: logits_triton", "torch"),
            ("loss in bfloat16", "loss: exponentials, soft_targets", ""),
            ("distillation", "distillation", "torch"),
            ("attention", "attention: triton", "attention: torch"),
        ):
            if builds_of(ways[way], each):
                compiled = {True: "compiled ahead of time", False: "does not compile", None: "untested"}
                status = "measured on an H200" if hopper else compiled[built.get((each.name, way))]
                expected = "fast" if hopper else UNTRIED
            elif fallback:
                way, status = fallback, "untested"
                expected = f"slow, tiles of torch's products; {UNTRIED}"
            else:
                continue
            yield dict(zip(PLATFORMS, (each.cards, each.name, call, way, status, expected)))
    bf16, other = "loss in bfloat16", "log-probabilities and other losses in bfloat16"
    for platform, call, way, status, expected in (
        ("CPU with avx512_bf16 or AMX", bf16, "loss: cpu_exponentials", "measured", "fast"),
        ("CPU with avx512_bf16 or AMX", other, "loss: cpu_logits", "measured", OVER_PRODUCTS),
        ("CPU with avx512_bf16 or AMX", "distillation in bfloat16", "torch", "measured", OVER_PRODUCTS),
        ("any CPU", losses, "loss: logits_torch", "measured", "products of torch's BLAS"),
        ("any CPU", "distillation", "torch", "tested", "products of torch's BLAS"),
        ("any CPU", "attention", "attention: sdpa or torch", "measured", "fast in float32"),
        ("any CPU, TRITON_INTERPRET=1", "every kernel", "backend='triton'", "interpreted", "for tests alone"),
        ("NVIDIA before sm_80", "attention", "attention: torch", "untested", f"slow; {UNTRIED}"),
        ("Apple (mps), Intel (xpu)", "every call", "plain torch", SIMULATED, f"slow; {UNTRIED}"),
    ):
        yield dict(zip(PLATFORMS, (platform, "", call, way, status, expected)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", help="an architecture, as sm_120; repeatable")
    parser.add_argument("--way", action="append", choices=[way.name for way in WAYS], help="repeatable")
    given = parser.parse_args()
    import triton

    from lowtide.tools.environment import commit

    for architecture in ARCHITECTURES:
        for way in WAYS:
            wanted = architecture.name in (given.only or [architecture.name])
            wanted = wanted and way.name in (given.way or [way.name])
            if wanted and builds_of(way, architecture):
                now = datetime.now(timezone.utc).isoformat(timespec="seconds")
                about = {"date": now, "commit": commit(), "triton": triton.__version__}
                row = compile_way(way, architecture)
                print(row, flush=True)
                write(about | row)


def write(row: dict[str, Any]) -> None:
    """Put the row into the table of builds, and make the table of platforms again."""
    path, rows = DATA / "builds.csv", []
    if path.exists():
        with path.open(newline="") as file:
            rows = [*csv.DictReader(file)]
    key = ("architecture", "way")
    rows = [each for each in rows if any(each[name] != row[name] for name in key)] + [row]
    names = [each.name for each in ARCHITECTURES], [way.name for way in WAYS]
    rows.sort(key=lambda each: [order.index(each[name]) for order, name in zip(names, key)])
    DATA.mkdir(parents=True, exist_ok=True)
    for file_name, columns, lines in (
        ("builds.csv", BUILDS, rows),
        ("platforms.csv", PLATFORMS, platforms(rows)),
    ):
        with (DATA / file_name).open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
