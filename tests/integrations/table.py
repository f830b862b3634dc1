"""`python -m tests.integrations.table` writes docs/reference/models.md: what a deferral and
lowtide's attention do for each language model of the installed transformers that can be built
small."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn

import lowtide
from lowtide.integrations.transformers import DenseMaskWarning, register_attention
from lowtide.integrations.transformers.attention import attention
from tests.deferred.helpers import norm
from tests.integrations.dense import register_exactly
from tests.integrations.inputs import Inputs, inputs_of
from tests.integrations.zoo import NotTried, build, everything, step

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
INTRODUCTION = """\
# Transformers, model by model

Written by `python -m tests.integrations.table` (transformers {transformers}, torch {torch}, CPU, float32).

[Transformers](../howto/transformers.md) shows `lowtide.defer_logits`, the `Trainer`'s callback and
`attn_implementation="lowtide"`. The latter never forms the matrix of scores, whichever options a model has:
soft cap, sliding window, sinks, position bias with its gradient, grouped key heads, dropout. It turns the
model's mask into one of these, for M queries and N keys:

| the mask | becomes |
|---|---|
| causal, sliding, local both ways, all; with a cache, too | two numbers: the first and last diagonal |
| padding: an `attention_mask` [B, N] with zeros | besides, a view [B, 1, 1, N] of it |
| padding beside a position bias [1, H, M, N] (T5) | one feature more of queries and keys |
| several sequences in a row (`position_ids` that begin again), chunks (Llama 4) | their lengths; \
the model's mask is looked at a few rows at a time |
| that of one query (`generate`) | at most [B, 1, 1, N] |
| a tensor [B, 1, M, N] that the caller passes | used as it is; beside a position bias [B, H, M, N] |
| anything else: chunks beside padding, blocks of an image | [B, 1, M, N] bool, and a `DenseMaskWarning` |

* A query that sees no key, as with padding on the left, has the result 0, where "eager" averages over all
  values. (Beside a position bias the result is an average over hidden keys.) Such a query predicts the first
  real token, so if that token has a label, the losses differ.
* `output_attentions=True` is an error, since there are no weights to return. A few models compute with the
  mask in their own code, or lengthen their keys afterwards (in the table: refused). They raise an error when
  they run.
* `torch.compile(fullgraph=True)` needs an `attention_mask`, if only one of ones. Without it, only the numbers
  of `position_ids` say whether a row has several sequences, and the graph breaks where these are read.
  Compiled code gives no `DenseMaskWarning`.

The table has a training step of two layers (hidden 256, 8 heads, float32, on a CPU), with 2048 tokens of
which 100 are padding:

| | peak, "eager" | "lowtide" | largest tensor, "eager" | "lowtide" |
|---|---|---|---|---|
| Gemma 2 (soft cap, window 512) | 829 MiB | 99 MiB | 128 MiB | 4 MiB |
| gpt-oss (sinks, window 512, 4 experts) | 653 MiB | 212 MiB | 128 MiB | 16 MiB |

## Model by model

Each model was built as small as its configuration allows, with random weights. It took one training step
unchanged, one under `lowtide.defer_logits(model)`, and one with `attn_implementation="lowtide"`.

* *inputs*: text alone if the model runs on it, even if the model also takes images or speech
* *training*: *fused* means one fused loss, without logits, from the model's own unmodified code
* *evaluation*: the logits that the model returns in eval mode; *real*: a tensor (for `generate`, metrics)
* *attention*: *yes* if lowtide computes it; *own* if the model's code does not use the AttentionInterface, or
  has no attention, so that nothing changes
* *difference*: first between the deferred and the unchanged model, then between lowtide's attention and
  "eager". It is the largest difference of the loss, or of the gradient of any parameter relative to the norm
  of all gradients. If a model magnifies roundings to more than 8 of them (1e-06), the difference in float64
  is smaller

Of the {all} classes that this version has for language models (causal, masked, sequence to sequence, with
images, with speech), {built} were built. {fused} of {built} models are fused, with real logits in evaluation;
{attending} have lowtide's attention.

| model | inputs | training | evaluation | difference | attention | difference | why not |
|---|---|---|---|---|---|---|---|
"""
NOT_TRIED = """

## Not tried

| model | why |
|---|---|
"""
Step = dict[str, torch.Tensor]
Way = Callable[[nn.Module, Inputs], Step]
ROUNDINGS = 8 * torch.finfo(torch.float32).eps


class Counted:
    """lowtide's attention, and how often a model has asked for it."""

    calls = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return attention(*args, **kwargs)  # type: ignore[arg-type]


def row(name: str, model: nn.Module) -> list[str]:
    words, inputs = inputs_of(model)
    *deferral, why = deferred(model.train(), inputs)
    *own, why_own = attended(model.train(), inputs)
    return [name, words, *deferral, *own, "; ".join(each for each in (why, why_own) if each)]


def deferred(model: nn.Module, inputs: Inputs) -> tuple[str, str, str, str]:
    expected = evaluated(model, inputs)
    try:
        deferral = lowtide.defer_logits(model)
    except ValueError as error:
        return "refused", "real", "", f"training: {error}"
    with deferral:
        assert torch.equal(evaluated(model, inputs), expected)
        step(model, inputs)
    differs = difference(model, inputs, step, deferring)
    if deferral.fused == 1 and not deferral.materialized:
        return "fused", "real", differs, ""
    why = ", ".join(deferral.materialized) or "the head is not called"
    return "real logits", "real", differs, f"training: {why}"


def attended(model: nn.Module, inputs: Inputs) -> tuple[str, str, str]:
    counted = Counted()
    transformers.AttentionInterface.register("lowtide", counted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attending("lowtide")(model, inputs)
        except (ValueError, AttributeError) as error:
            return "refused", "", f"attention: {error}"
    differs = difference(model, inputs, attending("eager"), attending("lowtide"), attending("exactly"))
    if not counted.calls:
        return "own", "", ""
    dense = any(issubclass(each.category, DenseMaskWarning) for each in caught)
    return "yes, with a mask" if dense else "yes", differs, ""


def evaluated(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    logits = model.eval()(**inputs).logits
    model.train()
    assert isinstance(logits, torch.Tensor)
    return logits


def deferring(model: nn.Module, inputs: Inputs) -> Step:
    with lowtide.defer_logits(model):
        return step(model, inputs)


def attending(implementation: str) -> Way:
    def way(model: nn.Module, inputs: Inputs) -> Step:
        model.set_attn_implementation(implementation)
        return step(model, inputs)

    return way


def difference(model: nn.Module, inputs: Inputs, plain: Way, ours: Way, exact: Way | None = None) -> str:
    """Raises if it is more than a few roundings, unless it is none in float64 of the same model."""
    largest = largest_difference(ours(model, inputs), plain(model, inputs))
    if largest > ROUNDINGS:
        wide = {key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}
        one, other = (way(copy.deepcopy(model).double(), wide) for way in (ours, exact or plain))
        assert largest_difference(one, other) < ROUNDINGS
    return f"{largest:.0e}"


def largest_difference(found: Step, plain: Step) -> float:
    assert found.keys() == plain.keys()
    whole = sum(norm(each) ** 2 for key, each in plain.items() if key != "loss") ** 0.5
    return max(
        norm(found[key] - plain[key]) / (norm(plain[key]) if key == "loss" else whole) for key in plain
    )


def prepare() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    register_attention()
    register_exactly()


def in_one_line(error: Exception) -> str:
    """The first sentence of an error."""
    return " ".join(str(error).split(". ")[0].split())


def main() -> None:
    prepare()
    rows, left = [], []
    for name in sorted(everything()):
        try:
            model = build(name)
        except (NotTried, ImportError) as error:
            left.append([name, in_one_line(error)])
            continue
        try:
            step(model, inputs_of(model)[1])
        except Exception as error:  # of the model alone: nothing of lowtide is in it yet
            left.append([name, f"its own step fails so small: {in_one_line(error)}"])
            continue
        rows.append(row(name, model))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    counts = {
        "all": len(rows) + len(left),
        "built": len(rows),
        "fused": sum(each[2] == "fused" for each in rows),
        "attending": sum(each[5].startswith("yes") for each in rows),
    }
    table, rest = ("\n".join(f"| {' | '.join(each)} |" for each in part) for part in (rows, left))
    PAGE.write_text(INTRODUCTION.format(**versions, **counts) + table + NOT_TRIED + rest + "\n")


if __name__ == "__main__":
    main()
