"""The same run with both losses, one after the other, each in a process of its own."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from importlib.util import find_spec

import torch

from lowtide.train.config import Config, UserError
from lowtide.train.loop import Run, train
from lowtide.train.trainer import LOSSES


def train_both(config: Config) -> list[Run]:
    if find_spec("matplotlib") is None:
        raise UserError(
            "--loss both ends with a figure; install matplotlib with: pip install 'lowtide[plot]'"
        )
    return [train_apart(replace(config, loss=loss)) for loss in LOSSES]


def train_apart(config: Config) -> Run:
    """In a fresh process, so that memory which one loss left behind is not held against the other."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as child:
        try:
            return child.submit(train, config).result()
        except (BrokenProcessPool, torch.OutOfMemoryError) as death:
            raise UserError(
                f"the {config.loss} run died, most likely for want of memory; try a smaller --batch"
            ) from death
