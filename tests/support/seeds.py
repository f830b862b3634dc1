"""`torch.manual_seed` without the devices that are not there.

For each that may come later it keeps the stack that it is called from, written out. This takes a
hundred times as long as the seed itself, in a test with a deep stack half a millisecond.
"""

import torch


def seed_the_cpu_alone() -> None:
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = _forget


def _forget(seed: int) -> None:
    pass
