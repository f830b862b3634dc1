"""Turn text into tokens: the sources of Python's standard library, or the user's own files.

A byte-level BPE tokenizer is trained first. The tokenizer and the token ids are cached under a name
that depends on the text and the vocabulary size. So a changed text or vocabulary never uses an old
cache.
"""

import contextlib
import hashlib
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lowtide.tools import files
from lowtide.tools.errors import UserError

END_OF_TEXT = "<|endoftext|>"
HELD_OUT = 0.05
CACHE_FORMAT = 1
# Tables of data rather than code, and packages outside the standard library.
LEFT_OUT = {"encodings", "test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Corpus:
    name: str  # A hash of the text.
    tokenizer: Tokenizer
    train: Tensor
    valid: Tensor


def load_corpus(path: Path | None, vocab_size: int, context: int) -> Corpus:
    texts = read_standard_library() if path is None else read_texts(path)
    name = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    cache = cache_directory() / f"tokens-{name}-{vocab_size}.pt"
    try:
        saved = files.load(cache)
    except (OSError, files.DamagedFile):
        saved = {}
    if saved.get("format") != CACHE_FORMAT:
        saved = tokenize(texts, vocab_size)
        # The cache only saves time.
        with contextlib.suppress(OSError):
            files.save(saved, cache)

    ids = saved["ids"]
    held_out = max(int(len(ids) * HELD_OUT), context + 1)
    if len(ids) < held_out + context + 1:
        raise UserError(
            f"the text has only {len(ids)} tokens, too few for sequences of {context}: "
            f"give more text, or a smaller --context"
        )
    return Corpus(name, Tokenizer.from_str(saved["tokenizer"]), ids[:-held_out], ids[-held_out:])


def batch(ids: Tensor, *, rows: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return random windows and their successors, [rows, context] each.

    They depend on (seed, step) alone, so that a resumed run reads the same data.
    """
    # A generator uses 32 bits of its seed. With this stride, runs of two seeds read the same
    # windows only after a million steps.
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(ids) - context, (rows, 1), generator=generator)
    windows = ids[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def read_standard_library() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [
        path for path in sorted(root.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(root).parts)
    ]
    if not sources:
        raise UserError(f"this Python keeps no sources in {root}: give text of your own with --data PATH")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    # Shuffle: the end of the text is held out, and should not be the files last in the alphabet.
    random.Random(0).shuffle(texts)
    return texts


def read_texts(path: Path) -> list[str]:
    if not path.exists():
        raise UserError(f"--data {path}: there is no such file or directory")
    if path.is_char_device() or path.is_block_device():
        raise UserError(f"--data {path}: a device is no text; give a file or a directory of files")
    paths = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    texts = [read_text(file) for file in paths]
    if not any(text.strip() for text in texts):
        raise UserError(f"--data {path}: there is no text in it")
    return texts


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(
            f"--data: {path} is not UTF-8 text; point --data at text files, or a directory of nothing else"
        )
    return text


def tokenize(texts: list[str], vocab_size: int) -> dict:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size:
        raise UserError(
            f"the text allows a vocabulary of {reached}, not {vocab_size}: "
            f"give --vocab-size {reached}, or more text"
        )
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    ids = [token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids + end]
    return {
        "format": CACHE_FORMAT,
        "tokenizer": tokenizer.to_str(),
        "ids": torch.tensor(ids, dtype=torch.int32),
    }


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "lowtide"
