"""The C function that launches a kernel, called as the launcher of Triton 3.6 calls it.

The launcher below does what that release's does: a card's tests launch by the real one.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from lowtide.core.kernels import handle
from lowtide.core.kernels.handle import MOST_MAPS, TensorMaps, handle_of

OPTIONS = 9  # arguments between the stream and the kernel's values


def _map_of(descriptor, metadata):
    """As Triton's, but for the map itself."""
    made.append(descriptor.base.data_ptr())
    where = descriptor.base.data_ptr(), metadata, *descriptor.block_shape
    return [where, *descriptor.shape, *descriptor.strides]


made = []


def wrapped(launcher, indices, tensordesc_meta):
    def inner(*arguments):
        final, metadata = list(arguments[: 4 + OPTIONS]), iter(tensordesc_meta)
        for place, each in enumerate(arguments[4 + OPTIONS :]):
            final += _map_of(each, next(metadata)) if place in indices else [each]
        return launcher(*final)

    return inner


class CudaLauncher:
    launch_cooperative_grid, launch_pdl = False, True
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, *indices, scratch=0):
        self.global_scratch_size, self.c_function = scratch, _Function()
        self.seen, self.launch = self.c_function.seen, self.c_function
        if indices:
            self.launch = wrapped(self.c_function, indices, [f"box {place}" for place in indices])

    def __call__(self, width, height, depth, stream, function, *rest):
        options = self.launch_cooperative_grid, self.launch_pdl, None, None
        self.launch(width, height, depth, stream, function, *options, *rest)


class _Function:
    """The function of C, which is no function of Python."""

    def __init__(self):
        self.seen = []

    def __call__(self, *arguments):
        self.seen.append(arguments)


def compiled_by(run):
    return SimpleNamespace(run=run, function=17, packed_metadata=(4, 1, 512))


@pytest.fixture(autouse=True)
def of_triton_3_6(monkeypatch):
    monkeypatch.setattr(handle, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(driver, "make_tensordesc_arg", _map_of)
    made.clear()


def test_same_arguments_without_descriptors():
    run = CudaLauncher()
    found = handle_of(compiled_by(run))
    assert found.launch is run.launch
    found.launch(1, 2, 3, 5, *found.before, 0x1000, 7, None)
    run(1, 2, 3, 5, 17, (4, 1, 512), None, None, None, 0x1000, 7, None)
    assert run.seen[0] == run.seen[1]
    assert len(run.seen[0]) == 4 + OPTIONS + 3


def test_same_arguments_with_descriptors():
    run, memory = CudaLauncher(0, 2), torch.zeros(8, 64)
    boxes = [
        TensorDescriptor(memory, [8, 64], [64, 1], [4, 8]),
        TensorDescriptor(memory, [8, 64], [64, 1], [8, 64]),
    ]
    found = handle_of(compiled_by(run))
    maps = [TensorMaps(box, metadata) for box, metadata in zip(boxes, found.map_metadata)]
    at = memory.data_ptr()
    for _ in range(3):
        found.launch(1, 2, 3, 5, *found.before, *maps[0][at], 9, *maps[1][at])
    assert len(made) == 2  # one map of each
    run(1, 2, 3, 5, 17, (4, 1, 512), None, None, None, boxes[0], 9, boxes[1])
    assert [each == run.seen[3] for each in run.seen] == [True] * 4


def test_maps_of_many_addresses():
    box = TensorDescriptor(torch.zeros(8, 64), [8, 64], [64, 1], [4, 8])
    maps = TensorMaps(box, "box")
    for address in range(0, 3 * 16 * MOST_MAPS, 16):
        assert maps[address][0][0] == address
        assert len(maps) <= MOST_MAPS


@pytest.mark.parametrize("reason", ["release", "scratch memory", "descriptors", "another launcher"])
def test_otherwise_by_triton(reason, monkeypatch):
    run = CudaLauncher(0, scratch=int(reason == "scratch memory"))
    if reason == "release":
        monkeypatch.setattr(handle, "triton", SimpleNamespace(__version__="3.7.0"))
    if reason == "another launcher":
        run = lambda *arguments: None  # noqa: E731
    found = handle_of(compiled_by(run), takes_maps=reason != "descriptors")
    assert found == (run, (17, (4, 1, 512), None, None, None), None)
