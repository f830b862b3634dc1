"""`python -m tests.integrations.table` writes docs/transformers.md: what a deferral does for each language
model of the installed transformers that can be built small."""

import warnings
from pathlib import Path

import torch
import transformers
from torch import nn

import lowtide
from tests.deferred.helpers import norm
from tests.integrations.zoo import batch, build, everything, step

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
INTRODUCTION = """\
# Transformers: model by model

Written by `python -m tests.integrations.table` (transformers {transformers}, torch {torch}, CPU, float32).
Each model was built as small as its configuration allows, with random weights, and took one training step as
it is and one under `lowtide.defer_logits(model)`.

* *fused*: one fused loss, no logits made, by the model's own unmodified code
* *evaluation*: the logits that the model returns in eval mode; *real*: a tensor (for `generate`, metrics)
* *difference*: of the gradients, the largest of any parameter, relative to the norm of all; *random*: two
  steps of the model as it is differ already

{fused} of {built} models are fused, with real logits in evaluation.

| model | training | evaluation | difference |
|---|---|---|---|
"""


def row(name: str, model: nn.Module) -> tuple[bool, str]:
    plain, again = step(model), step(model)
    try:
        deferral = lowtide.defer_logits(model)
    except ValueError:
        return False, f"| {name} | refused: no linear head | real | |"
    with deferral:
        found = step(model)
        model.eval()
        logits = model(**batch()).logits
    whole = sum(norm(each) ** 2 for key, each in plain.items() if key != "loss") ** 0.5
    difference = max(norm(found[key] - plain[key]) for key in plain if key != "loss") / whole
    repeatable = all(torch.equal(again[key], plain[key]) for key in plain)
    fused = deferral.fused == 1 and not deferral.materialized
    training = "fused" if fused else ", ".join(deferral.materialized) or "not"
    evaluation = "real" if isinstance(logits, torch.Tensor) else type(logits).__name__
    shown = f"{difference:.0e}" if repeatable else "random"
    return fused, f"| {name} | {training} | {evaluation} | {shown} |"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows, left = [], []
    for name in sorted(everything()):
        try:
            model = build(name)
            step(model)
        except Exception:  # whatever a configuration of unusual sizes runs into
            left.append(name)
            continue
        rows.append(row(name, model))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    counts = {"fused": sum(fused for fused, _ in rows), "built": len(rows)}
    page = INTRODUCTION.format(**versions, **counts) + "\n".join(text for _, text in rows)
    page += "\n\nNot tried, because these could not be built small, or did not run then, by the means of "
    page += f"`tests/integrations/zoo.py`: {', '.join(left)}.\n"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
