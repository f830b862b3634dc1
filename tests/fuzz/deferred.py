"""Programs of tensor operations on deferred logits: values and gradients of real ones, or an error.

What torch refuses must be refused. What torch takes must be right, but for operands that are
changed before they are used: then the right old answer, or a RuntimeError.
"""

import dataclasses
from collections.abc import Callable

from tests.fuzz.compare import Finding
from tests.fuzz.deferred_check import check
from tests.fuzz.deferred_ends import LOSSES, NUMBERS_OF
from tests.fuzz.deferred_numbers import CASTS, COPIES, FUNCTIONS, WITH_NUMBERS, WITH_TENSORS, in_place
from tests.fuzz.deferred_program import NAMES, Line, Program
from tests.fuzz.deferred_shapes import JOINED, SHAPES
from tests.fuzz.deferred_writer import Writer
from tests.fuzz.draw import Draw

TABLES = (WITH_NUMBERS, WITH_TENSORS, FUNCTIONS, CASTS, COPIES, SHAPES, JOINED)
STARTS = (
    *(6 * ["z = model(x)"]),
    "h = torch.tanh(e(x)); z = head(h)",
    "h = torch.tanh(e(x)); z = head(h.flatten(0, 1))",
    "h = e(x); z = head(h[0, 0])",
    "h = e(x); z = checkpoint(head, h, use_reentrant=True)",
    "h = e(x); z = checkpoint(head, h, use_reentrant=False)",
    "z = checkpoint(lambda h: head(torch.tanh(h)), e(x), use_reentrant=True)",
    "z = checkpoint(model, x, use_reentrant=False)",
    'with autocast("bf16"): z = model(x)',
    'with autocast("f16"): z = model(x)',
    "h = e(x); z = head(h) + head(h * 0.5)",
    "h = e(x); z = head(h) + (h @ h.mT) @ head(h).detach()",
    "with torch.no_grad(): z = model(x)",
    "model.eval(); z = model(x); model.train()",
)
AROUND = (*(12 * [""]), "autocast bf16", "autocast f16", "no_grad", "inference_mode", "checkpoint")
CHANGES = (
    *("head.weight.mul_(-2)", "e.weight.zero_()", "[p.sub_(0.5) for p in model.parameters()]", "x.zero_()"),
    *("h.zero_()", "head.bias.add_(3)"),
)


def case(draw: Draw) -> Callable[[], None]:
    sizes = (draw.randint(1, 3), draw.randint(1, 4), draw.choice((2, 3, 5)), draw.choice((3, 4, 5, 7)))
    adapter = draw.choice((None, None, None, "f32", "bf16", "f64"))
    frozen = draw.choice(("", "", "", "head", "e", "e head"))
    around = draw.choice(AROUND)
    if around == "checkpoint" and draw.chance(0.5):
        around += " reentrant"
    dtype = draw.choices(tuple(NAMES), (1, 2, 2, 4))[0]
    seed = draw.randrange(1 << 30)
    program = Program(seed, dtype, sizes, draw.chance(0.5), draw.chance(0.4), adapter, frozen, around, [])
    writer = Writer(draw, program)
    with writer.run.context():
        write(writer)
    if writer.error is not None:
        program.lines.append(Line("r = z"))
    draw.note(str(program))

    def run() -> None:
        try:
            check(program, draw.device)
        except Finding as finding:
            smaller, text = shrunk(program, finding, draw.device)
            raise Finding(f"{text}\n    shortest: seed={program.seed} {smaller}") from None

    return run


def write(w: Writer) -> None:
    start = w.choice(STARTS)
    w.write(start)
    for _ in range(w.draw.randint(0, 8)):
        if w.error is not None:
            return
        if w.draw.chance(0.05):
            changed(w, start)
        elif w.draw.chance(0.08):
            change_logits(w)
        else:
            table = w.choice(TABLES)
            right = w.choice(table)(w)
            # (Of a view that is made so, torch says that it requires a gradient, and gives none.)
            alone = table in (WITH_NUMBERS, WITH_TENSORS, FUNCTIONS) and w.draw.chance(0.08)
            w.write(f"with torch.no_grad(): z = {right}" if alone else f"z = {right}")
    if w.error is None:
        w.write(f"r = {w.choice(w.choice((LOSSES, NUMBERS_OF)))(w)}")


def changed(w: Writer, start: str) -> None:
    """Something that the logits were made of, and that no later line uses."""
    if w.draw.chance(0.2):
        name = w.choice(("head.weight", "e.weight"))
        w.write(f"{name}.data = {name}.data * 2", "data")
    elif w.draw.chance(0.5) and w.shape:
        name = w.new(w.choice(((), (w.last,), w.shape)), w.program.dtype)
        w.write(f"z = {w.choice(('z * ', 'z + ', 'z - '))}{name}")
        w.write(f"with torch.no_grad(): {name}.{w.choice(('zero_()', 'mul_(-3)', 'fill_(7)'))}", "changes")
    else:
        texts = [each for each in CHANGES if (each[0] != "h" or "h =" in start or each[:2] == "he")]
        texts = [each for each in texts if w.program.bias or "bias" not in each]
        w.write(f"with torch.no_grad(): {w.choice(texts)}", "changes")


def change_logits(w: Writer) -> None:
    alias = w.draw.chance(0.4)
    if alias:
        w.write(f"u = {w.choice(('z', 'z[..., :2]', 'z.detach()', 'z * 2', 'z.reshape(-1)'))}")
    w.write(in_place(w), "in place")
    if alias and w.error is None:
        w.write("z = z + u.sum()")


def shrunk(program: Program, finding: Finding, device: str) -> tuple[Program, str]:
    """The program without the lines that its finding, or one alike, does not need."""
    text, tries = str(finding), 80
    plainer = [{"around": ""}, {"adapter": None}, {"frozen": ""}, {"tied": False}, {"bias": False}]
    for change in plainer:
        program, text = _simpler(dataclasses.replace(program, **change), program, text, device)
    again = True
    while again and tries > 0:
        again = False
        for at in reversed(range(len(program.lines))):
            lines = program.lines[:at] + program.lines[at + 1 :]
            tries -= 1
            smaller, text = _simpler(dataclasses.replace(program, lines=lines), program, text, device)
            again, program = again or smaller is not program, smaller
    return program, text


def _simpler(other: Program, program: Program, text: str, device: str) -> tuple[Program, str]:
    """`other`, if the same is found in it."""
    try:
        check(other, device)
    except Finding as finding:
        if str(finding)[:12] == text[:12]:
            return other, str(finding)
    except Exception:
        pass
    return program, text
