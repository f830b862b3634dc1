"""Compiles a kernel of z - max ahead of time, without a GPU, and prints its PTX:

    python -m tests.ops.linear_cross_entropy.engines.distances_from_maximum

one JSON list a line: the transform and whether the slope is stored, too; and the PTX.
"""

import json

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowtide.ops.linear_cross_entropy.engines.formulas.row_math_triton import slope_of, transformed

POINTERS = ("u_ptr", "scale_ptr", "max_ptr", "distance_ptr", "slope_ptr")


@triton.jit
def distance_kernel(u_ptr, scale_ptr, max_ptr, distance_ptr, slope_ptr, SOFTCAP: tl.constexpr):
    place = tl.program_id(0)
    z, bend = transformed(tl.load(u_ptr + place), tl.load(scale_ptr), SOFTCAP, True)
    tl.store(distance_ptr + place, z - tl.load(max_ptr))
    if slope_ptr is not None:
        tl.store(slope_ptr + place, slope_of(bend, SOFTCAP, True))


SOFTCAPS = {"scale": 0.0, "soft cap": 30.0}

if __name__ == "__main__":
    for name, softcap in SOFTCAPS.items():
        for slope in (False, True):
            given = dict.fromkeys(POINTERS if slope else POINTERS[:-1], "*fp32")
            constants = {"SOFTCAP": softcap} | ({} if slope else {"slope_ptr": None})
            types = {each: given.get(each, "constexpr") for each in distance_kernel.arg_names}
            source = ASTSource(distance_kernel, signature=types, constexprs=constants)
            options = {"enable_fp_fusion": softcap == 0}  # as in the launch of softmax_triton.py
            built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            print(json.dumps([[name, slope], built.asm["ptx"]]), flush=True)
