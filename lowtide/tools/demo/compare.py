"""Run the same training in ways to compare: both losses, or several ranks and one process.

The losses run one after the other, each in a process of its own.
"""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from lowtide.tools.demo.config import Config, LossChoice
from lowtide.tools.demo.data import load_corpus
from lowtide.tools.demo.loop import Run, train
from lowtide.tools.demo.trainer import LOSSES, read_checkpoint
from lowtide.tools.errors import UserError


def configs_of(config: Config) -> list[Config]:
    """Return the runs that are compared, or the run itself."""
    if config.parallel:
        return [config, replace(config, parallel=None, ranks=1)]
    if config.loss == LossChoice.both.value:
        return [replace(config, loss=loss) for loss in LOSSES]
    return [config]


def check_checkpoints(configs: list[Config]) -> None:
    """Refuse a checkpoint of another run now, and not after the others have trained for minutes."""
    first = configs[0]
    corpus = load_corpus(first.data, first.vocab_size, first.context)
    for one in configs:
        read_checkpoint(one, corpus.name)


def train_both(config: Config) -> list[Run]:
    configs = configs_of(config)
    check_checkpoints(configs)
    # OpenMP's threads wait by spinning, unless this is set before the process starts. On a busy
    # machine they keep each other from the cores, and a step takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return [train_apart(one) for one in configs]


def train_apart(config: Config) -> Run:
    """Train in a fresh process, so that memory left by one loss is not counted for the other."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=die_with_parent) as child:
        # Only this process answers Ctrl-C, and it ends the child, which would print a traceback.
        answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            result = child.submit(train, config)
        finally:
            signal.signal(signal.SIGINT, answer)
        try:
            return result.result()
        except (BrokenProcessPool, torch.OutOfMemoryError) as death:
            raise UserError(
                f"the {config.loss} run died, most likely for want of memory; try a smaller --batch"
            ) from death
        except BaseException:
            for each in multiprocessing.active_children():
                each.kill()
            raise


def die_with_parent() -> None:
    """End the child when its parent is gone.

    A killed parent could not end it, and the next run would write to the same files.
    """

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
