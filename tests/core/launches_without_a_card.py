"""Launches a kernel through core/kernels/launch.py and Triton in turn, on a driver that records:

    python -m tests.core.launches_without_a_card

prints for each launch whether the same compiled kernel got the same values. TRITON_INTERPRET must
not be set.
"""

import json

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia import hopper
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from lowtide.core.kernels.launch import remember_launches

launched = []


class Launcher:
    """Takes the place of what calls CUDA."""

    def __init__(self, src, metadata):
        self.compiled = src.signature, src.attrs, src.constants

    def __call__(self, *arguments):
        grid, values = arguments[:3], arguments[9:]
        plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in values]
        launched.append((self, grid, plain, any(isinstance(each, Tensor) for each in values)))


class Utils:
    def load_binary(self, *_):
        return 1, 2, 3, 0, 1024

    def get_device_properties(self, _):
        return {"max_shared_mem": 1 << 20}


class Driver:
    utils, launcher_cls = Utils(), Launcher

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7


@remember_launches
@triton.jit
def _kernel(x_ptr, y_ptr, box, scale, N, M, strides, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < N, other=0.0) * scale
    if y_ptr is not None:
        x += tl.load(y_ptr + place * M, mask=place < N, other=0.0)
    x += tl.load(x_ptr + place * strides[0] + strides[1])
    if box is not None:
        x += tl.sum(box.load([0, 0]).to(tl.float32))
    tl.store(x_ptr + place, x + SHIFT, mask=place < N)


@remember_launches
@gluon.jit
def _gluon_kernel(out_ptr, box, N, BLOCK: gl.constexpr):
    place = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))  # of four warps, as by default
    gl.store(out_ptr + place, place + N)


def gluon_cases():
    """Boxes of other sizes, dtypes and layouts, and one that lies as another does."""
    memory = torch.zeros(64, 64)
    out, half = torch.zeros(128, dtype=torch.int32), memory.bfloat16()
    for tensor, block, kind in (
        (memory, [16, 32], gl.float32), (memory + 1, [16, 32], gl.float32), (memory, [32, 32], gl.float32),
        (half, [16, 32], gl.bfloat16),
    ):  # fmt: skip
        plain = gl.NVMMASharedLayout.get_default_for(block, kind)
        swizzled = gl.NVMMASharedLayout(32, plain.element_bitwidth, 2)
        for layout in (plain, swizzled):
            box = hopper.TensorDescriptor(tensor, [64, 64], [64, 1], block, layout)
            for number in (3, 16):
                yield (out, box, number), {"BLOCK": 128}


def cases():
    memory = torch.zeros(4096)
    x, odd, other = memory[:64], memory[1:65], memory[1024:1088]
    box = TensorDescriptor(memory.view(64, 64), [64, 64], [64, 1], [16, 32])
    wide = TensorDescriptor(memory.view(64, 64), [64, 64], [64, 1], [16, 64])
    half = torch.zeros(64, 64, dtype=torch.bfloat16)
    halves = TensorDescriptor(half, [64, 64], [64, 1], [16, 32])
    first = (x, None, None, 2.0, 64, 3, (3, 0))
    changes = [{}, {0: other}, {0: odd}, {1: x}, {1: odd}, {1: half[0]}, {2: box}, {2: wide}, {2: halves}]
    changes += [{3: 1.0}, {3: 3}, {3: 1}, {3: True}, {4: 1}, {4: 16}, {4: 7}, {4: 1 << 31}, {4: -(1 << 33)}]
    changes += [{0: torch.nn.Parameter(x)}, {1: x, 5: 1}, {1: x, 5: 16}]
    changes += [{6: (1, 0)}, {6: (16, 1 << 31)}, {6: (3, True)}]
    for change in changes:
        arguments = tuple(change.get(place, each) for place, each in enumerate(first))
        for constants in ({"SHIFT": 1, "BLOCK": 64}, {"SHIFT": 2, "BLOCK": 64, "num_warps": 2}):
            yield arguments, constants


def main():
    driver.set_active(Driver())
    for kernel, of_kernel in ((_kernel, cases), (_gluon_kernel, gluon_cases)):
        launch_twice(kernel, of_kernel)


def launch_twice(kernel, of_kernel):
    for _ in range(2):  # the second time all is known
        for arguments, constants in of_kernel():
            launched.clear()
            kernel[(3, 2)](*arguments, **constants)
            kernel.kernel[(3, 2)](*arguments, **constants)
            (own, grid, values, tensors), (found, same_grid, same_values, _) = launched
            same = (own.compiled, grid, values) == (found.compiled, same_grid, same_values)
            print(
                json.dumps({"same": same, "tensors": tensors, "arguments": repr((arguments[1:], constants))})
            )
    print(json.dumps({"known": len(kernel.known)}))


if __name__ == "__main__":
    main()
