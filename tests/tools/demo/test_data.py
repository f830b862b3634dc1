import re

import pytest
import torch

from lowtide.tools.demo import data
from lowtide.tools.demo.data import batch, load_corpus
from lowtide.tools.errors import UserError


def test_tokens_round_trip(text):
    corpus = load_corpus(text, 512, context=32)
    tokens = torch.cat((corpus.train, corpus.valid)).tolist()
    assert corpus.tokenizer.decode(tokens) == text.read_text(encoding="utf-8")
    assert max(tokens) < corpus.tokenizer.get_vocab_size() == 512
    assert len(corpus.valid) == int(0.05 * len(tokens))


def test_directory_reads_all_files(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deeper").mkdir(parents=True)
    (folder / "b.txt").write_text("second " * 200)
    (folder / "a.txt").write_text("first " * 200)
    (folder / "deeper" / "c.md").write_text("third äöü " * 200, encoding="utf-8")
    corpus = load_corpus(folder, 260, context=8)
    decoded = corpus.tokenizer.decode(torch.cat((corpus.train, corpus.valid)).tolist())
    assert decoded == "first " * 200 + "second " * 200 + "third äöü " * 200


@pytest.mark.extended
def test_standard_library_in_fixed_order():
    texts = data.read_standard_library()
    assert len(texts) > 200
    assert texts == data.read_standard_library()
    assert sum("unittest.main()" in text for text in texts) < len(texts) / 20


def test_standard_library_by_default(text, monkeypatch):
    monkeypatch.setattr(data, "read_standard_library", lambda: [text.read_text(encoding="utf-8")])
    corpus = load_corpus(None, 512, context=32)
    assert torch.equal(corpus.train, load_corpus(text, 512, context=32).train)


def test_batch_windows_and_successors():
    ids = torch.arange(1000, dtype=torch.int32)
    tokens, targets = batch(ids, rows=5, context=16, seed=3, step=7)
    assert tokens.shape == targets.shape == (5, 16)
    assert torch.equal(targets, tokens + 1)
    assert tokens.dtype == torch.int64


def test_batch_depends_on_seed_and_step():
    ids = torch.arange(1000, dtype=torch.int32)

    def starts(seed, step):
        return tuple(batch(ids, rows=5, context=16, seed=seed, step=step)[0][:, 0].tolist())

    assert starts(0, 1) == starts(0, 1)
    assert len({starts(seed, step) for seed in range(4) for step in range(25)}) == 100


def test_batch_window_starts():
    ids = torch.arange(6, dtype=torch.int32)
    tokens, targets = batch(ids, rows=200, context=4, seed=0, step=0)
    assert set(tokens[:, 0].tolist()) == {0, 1}
    assert targets.max() == 5


def test_cache_used_second_time(text, monkeypatch):
    first = load_corpus(text, 512, context=32)
    monkeypatch.delattr(data, "tokenize")
    second = load_corpus(text, 512, context=32)
    assert torch.equal(first.train, second.train)
    assert first.tokenizer.to_str() == second.tokenizer.to_str()


@pytest.mark.parametrize("change", ["text", "vocabulary"])
def test_cache_by_text_and_vocabulary(text, cache, change):
    load_corpus(text, 512, context=32)
    if change == "text":
        text.write_text(text.read_text(encoding="utf-8") + "more", encoding="utf-8")
    load_corpus(text, 512 if change == "text" else 400, context=32)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "garbage", "truncated", "old"])
def test_cache_unusable_is_replaced(text, cache, damage):
    first = load_corpus(text, 512, context=32)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    if damage == "old":
        torch.save({"format": 0, "tokenizer": "of another time"}, file)
    else:
        file.write_bytes({"empty": b"", "garbage": b"garbage", "truncated": whole[: len(whole) // 2]}[damage])
    second = load_corpus(text, 512, context=32)
    assert torch.equal(first.train, second.train)
    assert torch.equal(torch.load(file)["ids"], torch.cat((first.train, first.valid)))


def test_data_missing(tmp_path):
    with pytest.raises(UserError, match="no such file or directory"):
        load_corpus(tmp_path / "nowhere", 512, context=32)


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_data_empty(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    with pytest.raises(UserError, match="no text in it"):
        load_corpus(path, 512, context=32)


def test_data_directory_empty(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="no text in it"):
        load_corpus(tmp_path / "folder", 512, context=32)


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n\x1a\n\x00\x00", b"ASCII and \x00 nothing else", b"caf\xe9"]
)
def test_data_binary(tmp_path, content):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "good.txt").write_text("text")
    (tmp_path / "folder" / "bad.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.bin is not UTF-8 text"):
        load_corpus(tmp_path / "folder", 512, context=32)


def test_vocabulary_larger_than_text(tmp_path, cache):
    path = tmp_path / "small.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    with pytest.raises(UserError, match="allows a vocabulary of") as refusal:
        load_corpus(path, 32_768, context=4)
    assert not cache.exists()
    allowed = int(re.search(r"give --vocab-size (\d+)", str(refusal.value))[1])
    assert load_corpus(path, allowed, context=4).tokenizer.get_vocab_size() == allowed


def test_context_longer_than_text(text):
    with pytest.raises(UserError, match="too few for sequences of 100000"):
        load_corpus(text, 512, context=100_000)
