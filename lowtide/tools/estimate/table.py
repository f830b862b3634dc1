"""Write and read estimates and measurements as a CSV, with a row for each setting and loss."""

import csv
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from lowtide.tools import files
from lowtide.tools.environment import ENVIRONMENT, Environment
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.tools.estimate.step import Estimate, Result
from lowtide.tools.estimate.tracker import CATEGORIES

OUT_OF_MEMORY = "out of memory"
SETTING = ("model", "batch", "length", "dtype", "optimizer", "checkpointing", "workspace")
RANKS = ("fsdp", "shard_head", "tp")  # Older files lack these columns, and are of one rank.
HELD = {category: f"{category}_bytes" for category in CATEGORIES}
OWN = ("loss", *HELD.values(), "when", "measured_bytes", "copy_of_logits", "hidden_states", "parameters")
COLUMNS = (*ENVIRONMENT, *SETTING, *RANKS, *OWN)


def write(results: Iterable[Result], path: Path) -> None:
    environment = asdict(Environment.of("cpu"))
    with files.whole_file(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(environment | _row(each) for each in results)


def _row(result: Result) -> dict[str, object]:
    one = result.estimate
    how = one.setting
    named = {"dtype": how.dtype.value, "optimizer": how.optimizer.value, "loss": one.loss.value}
    return {
        "card": one.device,
        "clocks": "",  # Memory does not depend on them.
        **asdict(how),
        **named,
        **{column: one.held[category] for category, column in HELD.items()},
        "when": one.when,
        "measured_bytes": OUT_OF_MEMORY if result.out_of_memory else result.measured,
        "copy_of_logits": one.logits,
        "hidden_states": one.hidden,
        "parameters": one.parameters,
    }


def read(path: Path) -> list[Result]:
    rows = files.read_table(path, ("card", *SETTING, *OWN), "lowtide estimate --csv")
    try:
        return [_result(row) for row in rows]
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from problem


def _result(row: dict[str, str]) -> Result:
    setting = Setting(
        row["model"],
        int(row["batch"]),
        int(row["length"]),
        Dtype(row["dtype"]),
        Optimizer(row["optimizer"]),
        row["checkpointing"] == "True",
        int(row["workspace"]) if row["workspace"] else None,
        int(row.get("fsdp", 1)),
        row.get("shard_head") == "True",
        int(row.get("tp", 1)),
    )
    estimate = Estimate(
        setting,
        Loss(row["loss"]),
        {category: int(row[column]) for category, column in HELD.items()},
        row["when"],
        int(row["copy_of_logits"]),
        int(row["hidden_states"]),
        int(row["parameters"]),
        row["card"],
    )
    out_of_memory = row["measured_bytes"] == OUT_OF_MEMORY
    measured = int(row["measured_bytes"]) if row["measured_bytes"] and not out_of_memory else None
    return Result(estimate, measured, out_of_memory)
