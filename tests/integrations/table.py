"""`python -m tests.integrations.table` writes docs/transformers.md: what a deferral and lowtide's attention
do for each language model of the installed transformers that can be built small."""

import warnings
from pathlib import Path

import torch
import transformers
from torch import nn

import lowtide
from lowtide.integrations.transformers import DenseMaskWarning, register_attention
from lowtide.integrations.transformers.attention import attention
from tests.deferred.helpers import norm
from tests.integrations.zoo import MOST_PARAMETERS, batch, build, everything, step

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
INTRODUCTION = """\
# Transformers

Written by `python -m tests.integrations.table` (transformers {transformers}, torch {torch}, CPU, float32).

`lowtide.defer_logits(model)` and the `Trainer`'s callback are in [deferred.md](deferred.md). The attention:

```python
from lowtide.integrations.transformers import register_attention

register_attention()
model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="lowtide")
```

The scores are never made, whatever the model asks for: soft cap, sliding window, sinks, position bias with
its gradient, grouped key heads, dropout. What is made of its mask, for M queries and N keys:

| the mask | what is made of it |
|---|---|
| causal, sliding, local both ways, all; with a cache, too | two numbers: the first and last diagonal |
| padding: an `attention_mask` [B, N] with zeros | besides, a view [B, 1, 1, N] of it |
| padding beside a position bias [1, H, M, N] (T5) | one feature more of queries and keys |
| several sequences in a row (`position_ids` that begin again), chunks (Llama 4) | their lengths; \
the model's mask is looked at a few rows at a time |
| that of one query (`generate`) | at most [B, 1, 1, N] |
| a tensor [B, 1, M, N] that the caller passes | used as it is; beside a position bias [B, H, M, N] |
| anything else: chunks beside padding, blocks of an image | [B, 1, M, N] bool, and a `DenseMaskWarning` |

* A query that sees no key, as padding on the left has them, gets 0, where "eager" averages over all values
  (beside a position bias it gets an average over hidden keys).
  With a label for the first real token, which such a query predicts, the losses differ.
* `output_attentions=True` is refused: there are no weights to return. So are a few models whose code computes
  with its mask, or lengthens its keys afterwards (in the table: refused), where they run.
* `torch.compile(fullgraph=True)` needs an `attention_mask`, of ones if need be: without one, whether there
  are several sequences in a row is in the numbers of `position_ids`. Otherwise the graph breaks there. What
  is compiled gives no `DenseMaskWarning`.

A training step of two layers (hidden 256, 8 heads, float32, on a CPU), 2048 tokens of which 100 are padding:

| | peak, "eager" | "lowtide" | largest tensor, "eager" | "lowtide" |
|---|---|---|---|---|
| Gemma 2 (soft cap, window 512) | 829 MiB | 99 MiB | 128 MiB | 4 MiB |
| gpt-oss (sinks, window 512, 4 experts) | 653 MiB | 212 MiB | 128 MiB | 16 MiB |

## Model by model

Each model was built as small as its configuration allows, with random weights, and took one training step as
it is, one under `lowtide.defer_logits(model)`, and one with `attn_implementation="lowtide"`.

* *training*: *fused* is one fused loss, no logits made, by the model's own unmodified code
* *evaluation*: the logits that the model returns in eval mode; *real*: a tensor (for `generate`, metrics)
* *attention*: *yes* where lowtide computes it; *own* where the model's code asks no AttentionInterface, or
  has no attention: then it stays as it is
* *differences*: of the gradients, the largest of any parameter, relative to the norm of all: deferred against
  the model as it is, and lowtide's attention against "eager"; *random*: two steps as it is differ already

{fused} of {built} models are fused, with real logits in evaluation; {attending} have lowtide's attention.

| model | training | evaluation | difference | attention | difference | why not |
|---|---|---|---|---|---|---|
"""


class Counted:
    """lowtide's attention, and how often a model has asked for it."""

    calls = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return attention(*args, **kwargs)  # type: ignore[arg-type]


def row(name: str, model: nn.Module) -> tuple[bool, bool, str]:
    fused, *deferral = deferred(model.train())
    attending, *own = attended(model.train())
    whys = "; ".join(each for each in (deferral.pop(), own.pop()) if each)
    return fused, attending, f"| {' | '.join([name, *deferral, *own, whys])} |"


def deferred(model: nn.Module) -> tuple[bool, str, str, str, str]:
    plain, again = step(model), step(model)
    try:
        deferral = lowtide.defer_logits(model)
    except ValueError as error:
        return False, "refused", "real", "", f"training: {error}"
    with deferral:
        found = step(model)
        model.eval()
        logits = model(**batch()).logits
    fused = deferral.fused == 1 and not deferral.materialized
    evaluation = "real" if isinstance(logits, torch.Tensor) else type(logits).__name__
    why = "" if fused else f"training: {', '.join(deferral.materialized) or 'the head is not called'}"
    return fused, "fused" if fused else "real logits", evaluation, difference(found, plain, again), why


def attended(model: nn.Module) -> tuple[bool, str, str, str]:
    model.set_attn_implementation("eager")
    plain, again = step(model), step(model)
    model.set_attn_implementation("lowtide")
    counted = Counted()
    transformers.AttentionInterface.register("lowtide", counted)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = step(model)
        except (ValueError, AttributeError) as error:
            return False, "refused", "", f"attention: {error}"
    if not counted.calls:
        return False, "own", "", ""
    dense = any(issubclass(each.category, DenseMaskWarning) for each in caught)
    return True, "yes, with a mask" if dense else "yes", difference(found, plain, again), ""


def difference(found: dict, plain: dict, again: dict) -> str:
    whole = sum(norm(each) ** 2 for key, each in plain.items() if key != "loss") ** 0.5
    largest = max(norm(found[key] - plain[key]) for key in plain if key != "loss") / whole
    return f"{largest:.0e}" if all(torch.equal(again[key], plain[key]) for key in plain) else "random"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    register_attention()
    rows, left = [], []
    for name in sorted(everything()):
        try:
            model = build(name)
            step(model)
        except Exception as error:  # whatever a configuration of unusual sizes runs into
            left.append(f"| {name} | {' '.join(str(error).split())[:140]} |")
            continue
        rows.append(row(name, model))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    counts = {"fused": sum(fused for fused, _, _ in rows), "built": len(rows)}
    page = INTRODUCTION.format(**versions, **counts, attending=sum(attending for _, attending, _ in rows))
    page += "\n".join(text for *_, text in rows)
    page += "\n\n## Not tried\n\nThese could not be built small (at most "
    page += f"{MOST_PARAMETERS // 10**6} million parameters), or did not run then, by the means of\n"
    page += "`tests/integrations/zoo.py`.\n\n| model | why |\n|---|---|\n" + "\n".join(left) + "\n"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
