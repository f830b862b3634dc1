import argparse
import inspect
from pathlib import Path

import pytest

from lowtide.tools.demo.config import Config
from lowtide.tools.demo.data import load_corpus
from lowtide.tools.demo.trainer import Trainer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lowtide"


@pytest.fixture
def text(tmp_path) -> Path:
    """Real text, a hundred kilobytes of it, that every Python has."""
    path = tmp_path / "argparse.txt"
    path.write_text(inspect.getsource(argparse), encoding="utf-8")
    return path


@pytest.fixture
def make_config(tmp_path, text):
    def make(**changes) -> Config:
        tiny = {
            "loss": "lowtide",
            "device": "cpu",
            "out": tmp_path / "run",
            "data": text,
            "vocab_size": 512,
            "width": 64,
            "depth": 2,
            "context": 32,
            "batch": 8,
            "steps": 12,
            "save_every": 5,
            "tied": False,
            "seed": 0,
        }
        return Config(**(tiny | changes))

    return make


@pytest.fixture
def make_trainer(make_config):
    def make(**changes) -> Trainer:
        config = make_config(**changes)
        return Trainer(config, load_corpus(config.data, config.vocab_size, config.context))

    return make
