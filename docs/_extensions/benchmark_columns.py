"""Make the text of each column that a table of benchmarks can have."""

from collections.abc import Callable
from typing import NamedTuple

from benchmark_records import Record

from lowtide.tools.bench.attention.real_table import TORCH
from lowtide.tools.bench.attention.table import ERRORS

GRADIENTS = ("grad_input_error", "grad_weight_error")


class Column(NamedTuple):
    """Define a column: its heading, and the text that it makes of a record."""

    heading: str
    text: Callable[[Record], str]


def _number(field: str, form: str, factor: float = 1.0) -> Callable[[Record], str]:
    return lambda record: format(float(record[field]) * factor, form) if record[field] else ""


def _milliseconds(field: str) -> Callable[[Record], str]:
    return lambda record: format(float(record[field]), ".1f" if float(record[field]) < 1000 else ",.0f")


def _peak_of_estimate(record: Record) -> str:
    kinds = ("weights", "gradients", "optimizer", "activations", "logits")
    return format(sum(int(record[f"{kind}_bytes"]) for kind in kinds) / 2**30, ".2f")


def _both(field: str, form: str) -> Callable[[Record], str]:
    """Return forward and backward in one cell; of inference there is forward alone."""
    names = (f"forward_{field}", f"backward_{field}")
    return lambda record: " / ".join(format(float(record[name]), form) for name in names if record[name])


def _spread(record: Record) -> str:
    """Return the 20th and the 80th percentile of both times, where a row has them."""
    names = [name for name in ("forward_ms", "backward_ms") if record[f"{name}_p20"]]
    return " / ".join(f"{float(record[f'{n}_p20']):.0f}–{float(record[f'{n}_p80']):.0f}" for n in names)


def _largest(record: Record, *fields: str) -> str:
    return format(max(float(record[field]) for field in fields if record[field]), ".1e")


def _side(record: Record) -> str | None:
    """Return whose column a row of attention stands in; None for torch's slower kernels."""
    if record["provider"] == record["best_of_torch"]:
        return "torch"
    return None if record["provider"] in TORCH else record["provider"]


def _attention_shape(record: Record) -> str:
    return f"{_batches_and_heads(record)}, {record['queries']} × {record['keys']}, {record['features']}"


def _square_attention_shape(record: Record) -> str:
    """Return the shape of a case that has as many keys as queries."""
    return f"{_batches_and_heads(record)}, {record['queries']}, {record['features']}"


def _batches_and_heads(record: Record) -> str:
    heads, key_heads = record["heads"], record["key_heads"]
    return f"{record['batches']}, {heads if heads == key_heads else f'{heads}/{key_heads}'}"


def _of_plain(record: Record) -> str:
    return format(1 + float(record["over_plain"]), ".2f")


COLUMNS = {
    "provider": Column("", lambda record: record["provider"]),
    "loss of": Column("loss", lambda record: record["loss"]),
    "case": Column("case", lambda record: record["case"]),
    "shape": Column(
        "N × D × V", lambda record: " × ".join(map(record.get, ("tokens", "features", "classes")))
    ),
    "length": Column("tokens", _number("length", ",.0f")),
    "dtype": Column("dtype", lambda record: record["dtype"]),
    "engine": Column("kernel", lambda record: record["engine"]),
    "ms": Column("ms", _milliseconds("ms")),
    "ratio": Column("ratio", _number("ratio", ".2f")),
    "fine ratio": Column("ratio", _number("ratio", ".3f")),
    "ranks": Column("ranks", lambda record: record["ranks"]),
    "head": Column("head", lambda record: record["head"]),
    "head shape": Column("D × V", lambda record: f"{record['features']} × {record['classes']}"),
    "tokens": Column("N", lambda record: f"{int(record['tokens']):,}"),
    "floor": Column("floor, ms", _number("floor_ms", ".2f")),
    "aligned floor": Column("aligned floor, ms", _number("aligned_floor_ms", ".2f")),
    "chunks": Column("tokens of a chunk", lambda record: record["chunks"]),
    "gradients": Column("error of dX or dW", lambda record: _largest(record, *GRADIENTS)),
    "aligned ratio": Column("ratio", _number("aligned_ratio", ".2f")),
    "predicted ratio": Column("predicted", _number("predicted_ratio", ".2f")),
    "over plain": Column("over plain", _number("over_plain", "+.1%")),
    "over dense": Column("over dense", _number("over_plain", "+.1%")),
    "of dense": Column("of dense", _of_plain),
    "of counted": Column("of the counted tokens alone", _of_plain),
    "ignored": Column("ignored", lambda record: f"{float(record['ignored']):.0%}"),
    "peak": Column("peak beyond, MiB", _number("peak_bytes", ",.0f", 2**-20)),
    "tokens per second": Column("tokens/s", _number("tokens_per_second", ",.0f")),
    "whole peak": Column("peak, GiB", _number("peak_bytes", ".1f", 2**-30)),
    "step loss": Column("loss", _number("step_loss", ".4f")),
    "loss": Column("error: loss", _number("loss_error", ".1e")),
    "dX": Column("dX", _number("grad_input_error", ".1e")),
    "dW": Column("dW", _number("grad_weight_error", ".1e")),
    "forward": Column("forward, TFLOP/s", _number("forward_tflops", ",.0f")),
    "backward": Column("backward, TFLOP/s", _number("backward_tflops", ",.0f")),
    "forward ms": Column("forward, ms", _number("forward_ms", ".2f")),
    "backward ms": Column("backward, ms", _number("backward_ms", ".2f")),
    "step ratio": Column("time, of the best peer's", _number("step_ratio", ".2f")),
    "error": Column("error of the result", _number("out_error", ".1e")),
    "model": Column("model", lambda record: record["model"]),
    "attention": Column("B, H, M × N, K", _attention_shape),
    "square attention": Column("B, H, M, K", _square_attention_shape),
    "both tflops": Column("TFLOP/s, forward / backward", _both("tflops", ",.0f")),
    "both whole ms": Column("ms, forward / backward", _both("ms", ",.0f")),
    "spread": Column("20th to 80th percentile", _spread),
    "options": Column("options", lambda record: record["options"]),
    "both ms": Column("ms, forward / backward", _both("ms", ".2f")),
    "both over torch": Column("over torch's quickest", _both("over_torch", ".2f")),
    "peak over torch": Column("memory over its", _number("peak_over_torch", ".2f")),
    "best of torch": Column("torch's quickest", lambda record: record["best_of_torch"]),
    "host": Column("host, µs", _both("host_us", ".0f")),
    "operator": Column("", lambda record: record["operator"]),
    "host call": Column(
        "N, D, V",
        lambda record: (
            f"{record['tokens']}, {record['features']}, {record['classes']}" if record["classes"] else ""
        ),
    ),
    "host forward": Column("forward", _number("forward_us", ",.0f")),
    "host backward": Column("backward", _number("backward_us", ",.0f")),
    "torch forward": Column("torch: forward", _number("eager_forward_us", ",.0f")),
    "torch backward": Column("torch: backward", _number("eager_backward_us", ",.0f")),
    "way": Column("why", lambda record: record["way"]),
    "largest error": Column("largest error", lambda record: _largest(record, *ERRORS)),
    "estimated": Column("estimated, GiB", _peak_of_estimate),
    "measured": Column("measured, GiB", _number("measured_bytes", ".2f", 2**-30)),
}
TEXTS = {
    *("provider", "loss of", "case", "shape", "dtype", "engine", "length", "head"),
    *("model", "ranks", "attention", "square attention", "options", "best of torch"),
    *("head shape", "tokens", "chunks", "ignored", "way"),
}
ACROSS: dict[str, Callable[[Record], str | None]] = {"side": _side}
