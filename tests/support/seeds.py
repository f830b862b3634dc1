"""Make `torch.manual_seed` seed the CPU alone.

For each kind of device that is not initialised, torch formats the caller's stack, to seed that
device later. That takes a hundred times as long as the seed: below pytest, half a millisecond.
"""

import torch


def seed_the_cpu_alone() -> None:
    """Call this only where no such device is used."""
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = _forget


def _forget(seed: int) -> None:
    pass
