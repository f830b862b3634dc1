"""Calls the loss as on a Hopper card, on a driver that launches nothing:

    python -m tests.ops.linear_cross_entropy.engines.rehearsals_without_a_card

prints for each call what was rehearsed, and what its forward and backward then launched: names of
kernels and kinds of launches. TRITON_INTERPRET must not be set. Tensors lie on the CPU, and say
that they do not.
"""

import json
import math
import sys

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import lowtide
from lowtide.core.compile_ahead import launches as compile_ahead
from lowtide.core.compile_ahead.placeholders import Placeholder
from lowtide.core.kernels import backend
from lowtide.ops.linear_cross_entropy.engines import row_loss, row_loss_triton
from lowtide.ops.linear_cross_entropy.planning import operands, requirements
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.division import sizes as division
from lowtide.ops.linear_cross_entropy.planning.remembered import forget
from tests.core.launches_without_a_card import Driver

launched = []
BF16 = torch.bfloat16

CALLS = {
    "default": (300, 64, 1000, {}),
    "few tokens": (20, 64, 1000, {}),
    "long chunks": (9000, 64, 1000, {}),
    "several chunks": (3000, 64, 1000, {"workspace": 1 << 21}),
    "class blocks": (3000, 64, 1000, {"workspace": 800_000}),
    "ignored rows skipped": (300, 64, 1000, {"skips": True}),
    "no gradients": (300, 64, 1000, {"frozen": True}),
    "none": (300, 64, 1000, {"reduction": "none"}),
    "float16": (300, 64, 1000, {"dtype": torch.float16}),
    "float32": (300, 64, 1000, {"dtype": torch.float32}),
    "smoothed": (300, 64, 1000, {"label_smoothing": 0.1}),
    "many options": (300, 64, 1000, {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "bias": True}),
    "positions": (300, 64, 1000, {"positions": 3}),
    "odd sizes": (300, 63, 1001, {}),
    "odd address": (300, 64, 1000, {"odd": True}),
    "probabilities": (300, 64, 1024, {"probabilities": BF16}),
    "wide probabilities": (300, 64, 1000, {"probabilities": torch.float32}),
}


def pretend():
    """Let CPU tensors be planned for and computed as a Hopper card's; memory begins as zeros."""
    driver.set_active(Driver())
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.is_current_stream_capturing = lambda: False
    requirements.reason_against_triton = lambda *_: None
    requirements._has_tensor_maps = lambda _: True
    Call.device = property(lambda self: "cuda")
    operands._dtype = lambda _, options: options.compute_dtype
    row_loss.check_classes = row_loss_triton.check_classes = lambda *_: None
    JITFunction.run = record
    empty, product, accumulate = torch.empty, torch.mm, torch.addmm

    def zeroed(*size, **options):
        made = empty(*size, **options)
        return made if isinstance(made, Placeholder) else made.zero_()

    def multiplied(a, b, *, out=None, out_dtype=None):
        """As torch's; the CPU has no out_dtype."""
        if isinstance(a, Placeholder):
            return product(a, b, **{"out": out} if out is not None else {}, **_given(out_dtype=out_dtype))
        return zeroed(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype) if out is None else out

    def accumulated(sum, a, b, *, out, **widen):
        return accumulate(sum, a, b, out=out, **widen) if type(a) is Placeholder else out

    torch.empty, torch.mm, torch.addmm = zeroed, multiplied, accumulated
    torch.Tensor.new_empty = lambda self, *size, **options: self.new_zeros(*size, **options)
    torch.empty_like = torch.zeros_like


def _given(**options):
    return {name: each for name, each in options.items() if each is not None}


def record(self, *arguments, grid, warmup, **constants):
    launched.append(compile_ahead.Launch(self, grid, arguments, constants))


def described(launches):
    return [[each.kernel.fn.__name__, repr(each.kind)] for each in launches]


def call(
    N, D, V, *, dtype=BF16, bias=False, odd=False, probabilities=None, frozen=False, skips=False, positions=0,
    **options
):  # fmt: skip
    division.FEWEST_TOKENS = 1 if skips else 1 << 40
    forget()
    memory = torch.zeros(N * D + 8, dtype=dtype)
    x = memory[odd : odd + N * D].view(N, D).requires_grad_(not frozen)
    w = torch.zeros(V, D, dtype=dtype).requires_grad_(not frozen)
    b = torch.zeros(V, dtype=dtype, requires_grad=True) if bias else None
    target = torch.arange(N) % V if probabilities is None else torch.full((N, V), 1 / V, dtype=probabilities)
    if positions:
        w = torch.zeros(V, positions, D, dtype=dtype, requires_grad=True)
        target = target[:, None].expand(N, positions).contiguous()
    loss = lowtide.linear_cross_entropy(x, w, target, linear_bias=b, backend="triton", **options)
    forward = described(launched)
    launched.clear()
    if not frozen:
        (loss * 1).sum().backward()
    return forward


def log_probs():
    x, w = (torch.zeros(rows, 64, dtype=BF16, requires_grad=True) for rows in (300, 1000))
    found = lowtide.linear_log_probs(x, w, torch.arange(300), backend="triton")
    forward = described(launched)
    launched.clear()
    (found.log_prob + found.entropy).sum().backward()
    return forward


def main():
    pretend()
    division.MOST_OF_SKIPPING = math.inf
    rehearsed = []

    def note(device, launches):
        rehearsed.append(described(launches))
        compile_ahead._compiled.update({(device, each.kind): None for each in launches})

    compile_ahead._compile = note
    calls = {name: lambda sizes=sizes: call(*sizes[:3], **sizes[3]) for name, sizes in CALLS.items()}
    for pipelined in (False, True):
        backend.pipelines_on = lambda _, pipelined=pipelined: pipelined
        backend.FEWEST = 1
        for name, run in {**calls, "log-probabilities": log_probs}.items():
            compile_ahead._compiled.clear()
            rehearsed.clear()
            launched.clear()
            state = torch.get_rng_state()
            forward = run()
            print(
                json.dumps(
                    {
                        "name": name,
                        "pipelined": pipelined,
                        "rehearsed": list(rehearsed),
                        "forward": forward,
                        "backward": described(launched),
                        "draws": not torch.equal(torch.get_rng_state(), state),
                        "imported": [each for each in ("torch._dynamo", "sympy") if each in sys.modules],
                    }
                )
            )


if __name__ == "__main__":
    main()
