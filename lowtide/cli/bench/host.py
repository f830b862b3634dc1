"""Implement `lowtide bench host`: what a call takes of the host."""

from lowtide.cli.bench.tables import CaseTable, Out, Smoke, print_tables
from lowtide.cli.shared.parameters import DeviceOption
from lowtide.tools.bench.host import ATTENTION_CALLS, CALLS, HOST, SHAPES, attention_host_rows, host_rows
from lowtide.tools.environment import Device, choose_device


def host(device: DeviceOption = Device.auto, smoke: Smoke = False, out: Out = None) -> None:
    """Time what a call of each operator takes of the host, forward and backward.

    Each row is one operator at one number of tokens and head, in turn with the
    same in plain torch: the median time until Python goes on. A card computes
    meanwhile, and a small call waits for the host.
    """
    on = choose_device(device)
    shapes = SHAPES["cpu" if smoke else on]
    calls = 3 if smoke else CALLS
    tables = [CaseTable(str(shape), 6, host_rows(shape, on, calls)) for shape in shapes]
    tables.append(CaseTable("attention", len(ATTENTION_CALLS[on]), attention_host_rows(on, calls)))
    print_tables(tables, on, smoke, out, HOST)
