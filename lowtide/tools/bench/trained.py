"""Benchmark the head of a trained model, on hidden states of text that it never saw.

Random logits are small and all of one size. Those of a trained head reach 20, and a few classes
have most of a row's probability; only here does it show what rounding them costs. The checkpoint is
one of `lowtide train`. There are as many tokens as in the case, each from another place of the
held-out text. Features and classes are the checkpoint's own, because a trained head cannot be
resized.

Legend: N tokens, D features, V classes, T tokens of a sequence; B sequences, C tokens at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.tools import files
from lowtide.tools.bench.cases import Inputs, LossCase, with_ignored
from lowtide.tools.demo.data import load_corpus
from lowtide.tools.demo.model import GPT
from lowtide.tools.demo.trainer import CHECKPOINT
from lowtide.tools.errors import UserError

CHUNK = 1024


class TrainedHead(NamedTuple):
    hidden_ND: Tensor
    weight_VD: Tensor
    target_N: Tensor


@dataclass(frozen=True)
class TrainedCase(LossCase):
    head: Any = field(default=None, compare=False, repr=False)

    def inputs(self, requires_grad: bool) -> Inputs:
        """Return the first tokens of the held-out text."""
        kind = {"device": self.device, "dtype": self.dtype, "copy": True}
        hidden_ND, weight_VD = self.head.hidden_ND[: self.tokens].to(**kind), self.head.weight_VD.to(**kind)
        target_N = self.head.target_N[: self.tokens].to(self.device, copy=True)
        target_N = with_ignored(target_N, torch.Generator(self.device).manual_seed(0), self.ignored)
        return hidden_ND.requires_grad_(requires_grad), weight_VD.requires_grad_(requires_grad), target_N


def trained_cases(cases: Sequence[LossCase], directory: Path, data: Path | None) -> list[LossCase]:
    """Return these cases with the head of a checkpoint in place of a random one."""
    head = read_head(directory, data, max(case.tokens for case in cases), cases[0].device)
    V, D = head.weight_VD.shape
    made: list[LossCase] = []
    for case in cases:
        shape = (case.tokens, D, V, case.dtype, case.device)
        one = TrainedCase(f"{case.name}-trained", *shape, case.smoke, "trained", head=head)
        made.append(replace(one, largest_logit=largest_logit(*one.inputs(requires_grad=False)[:2])))
    return made


@torch.no_grad()
def read_head(directory: Path, data: Path | None, tokens: int, device: str) -> TrainedHead:
    path, saved = _checkpoint(directory)
    try:
        identity = saved["identity"]
        T, vocab_size, text = (identity[name] for name in ("context", "vocab_size", "text"))
        model = GPT(*(identity[name] for name in ("vocab_size", "width", "depth", "tied")))
        model.load_state_dict(saved["model"])
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise UserError(f"{path} cannot be read as a checkpoint of lowtide train") from problem
    corpus = load_corpus(data, vocab_size, T)
    if corpus.name != text:
        given = "Python's standard library" if data is None else f"--data {data}"
        raise UserError(f"{path} was trained on another text than {given}: give the --data of lowtide train")
    sequences = -(-tokens // T)
    if sequences * T >= len(corpus.valid):
        raise UserError(
            f"{len(corpus.valid)} tokens of the text are held out, and the case has {tokens}: "
            "train on more text, or choose a --case of fewer tokens"
        )
    tokens_BT = corpus.valid[: sequences * T].long().view(sequences, T)
    target_N = corpus.valid[1 : sequences * T + 1].long()
    model = model.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # The dtype of training.
        hidden = [model(tokens_BT[i : i + 8].to(device)).flatten(0, 1).cpu() for i in range(0, sequences, 8)]
    return TrainedHead(torch.cat(hidden)[:tokens], model.head.weight.detach().cpu(), target_N[:tokens])


def _checkpoint(directory: Path) -> tuple[Path, dict]:
    """Return the checkpoint in the directory itself, or of a loss in it, ours first.

    `lowtide train --out` makes such a directory.
    """
    for place in (directory, directory / "lowtide", directory / "eager"):
        path = place / CHECKPOINT
        try:
            return path, files.load(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except files.DamagedFile as problem:
            raise UserError(f"{path} cannot be read as a checkpoint of lowtide train") from problem
    raise UserError(
        f"--checkpoint {directory}: there is no checkpoint.pt; make one with: lowtide train --out {directory}"
    )


@torch.no_grad()
def largest_logit(hidden_ND: Tensor, weight_VD: Tensor) -> float:
    wide_VD = weight_VD.float()
    return max((x_CD.float() @ wide_VD.T).abs().max().item() for x_CD in hidden_ND.split(CHUNK))
