"""Lines that change the numbers of logits. Each entry gives the right-hand side of `z = ...`."""

from collections.abc import Callable

from tests.fuzz.deferred_writer import Writer
from tests.support.budgets import HALVES

Entry = Callable[[Writer], str]

NUMBERS = ("0.7", "-1.5", "2", "0", "True", "1e-3", "3.0", "-1", "1e30")


def number(w: Writer) -> str:
    return w.choice(NUMBERS)


WITH_NUMBERS: list[Entry] = [
    lambda w: f"z * {number(w)}",
    lambda w: f"{number(w)} * z",
    lambda w: f"z / {w.choice(('1.3', '-2', '4', '1e-3', 'V ** 0.5', '0'))}",
    lambda w: f"z + {number(w)}",
    lambda w: f"{number(w)} - z",
    lambda w: f"z - {number(w)}",
    lambda w: f"torch.mul(z, {number(w)})",
    lambda w: f"torch.add(z, {number(w)}, alpha={w.choice(('2', '0.5', '-1'))})",
    lambda w: f"torch.rsub(z, {number(w)})",
    lambda w: f"z.div({w.choice(('3', '-0.5'))})",
    lambda w: w.choice(("-z", "+z", "z.neg()", "torch.negative(z)")),
    lambda w: w.choice(("z ** 2", "z.square()", "torch.pow(z, 2)", "2.0 ** (0.1 * z)", "z ** 0")),
    lambda w: f"1.0 / (z.square() + {w.choice(('1', '0.5'))})",
]

WITH_TENSORS: list[Entry] = [
    lambda w: f"z * {w.beside()}",
    lambda w: f"{w.beside()} * z",
    lambda w: f"z + {w.beside()}",
    lambda w: f"{w.beside()} - z",
    lambda w: f"z - {w.beside()}",
    lambda w: f"z / ({w.beside()}.abs() + 1)",
    lambda w: f"{w.beside()} / (z.abs() + 1)",
    lambda w: f"z + {w.beside(w.choice(('i64', 'i32', 'u8', 'b8')))}",
    lambda w: f"z * {w.beside(w.choice(('i64', 'b8')))}",
    lambda w: f"z.add({w.beside()}, alpha={w.choice(('0.5', '-2'))})",
    lambda w: f"torch.sub(z, {w.beside()}, alpha=2)",
    lambda w: f"torch.mul({w.beside()}, z)",
    lambda w: f"torch.addcmul(z, {w.beside()}, {w.beside()}, value=0.5)",
    lambda w: f"torch.lerp(z, {w.new(w.shape, w.program.dtype)}, 0.3)",
    lambda w: f"{w.new((), learned=True)} * z + {w.new((w.last,))}",
    lambda w: f"z.masked_fill({w.new(w.shape, 'b8')}, {w.choice(('-1e4', '0', 'lowest', '-torch.inf'))})",
    lambda w: f"z.masked_fill({w.new((w.last,), 'b8')}, {w.choice(('-1e4', '0', 'lowest'))})",
    lambda w: f"torch.where({w.new(w.shape, 'b8')}, z, {w.choice(('0.0', w.new(w.shape)))})",
    lambda w: f"torch.where({w.new((w.last,), 'b8')}, {w.beside()}, z)",
    lambda w: f"torch.maximum(z, {w.new(w.shape, w.program.dtype)})" if w.certain else "z",
    lambda w: (
        f"z * {w.choice(('head.weight.sum()', 'head.weight.mean(1)[: z.shape[-1]]', 'e.weight[0, 0]'))}"
    ),
    lambda w: f"z + {w.new((w.last, 2))} @ {w.new((2,))}",
]

FUNCTIONS: list[Entry] = [
    lambda w: f"z.softmax({w.dim()})",
    lambda w: f"z.log_softmax({w.dim()})",
    lambda w: f"F.softmax(z, {w.dim()}, dtype={w.choice(('f32', 'f64', 'None'))})",
    lambda w: f"F.log_softmax(z, dim=-1, dtype={w.choice(('f32', 'f64', 'None'))})",
    lambda w: w.choice(("torch.tanh(z)", "z.tanh()", "torch.sigmoid(z)", "z.sin()", "F.gelu(z)")),
    lambda w: w.choice(("(0.1 * z).exp()", "z.exp()", "torch.expm1(0.1 * z)", "z.abs().add(1).log()")),
    lambda w: w.choice(("abs(z)", "z.abs()", "F.relu(z)", "F.softplus(z)", "F.logsigmoid(z)")),
    lambda w: f"z.clamp({w.choice(('-1, 1', 'min=0', 'max=0.5', '-1e4, 1e4'))})",
    lambda w: f"{(cap := w.choice((5, 30)))} * torch.tanh(z / {cap})",
    lambda w: f"F.dropout(z, 0.0, {w.choice(('True', 'False'))})",
    lambda w: w.choice(("z.nan_to_num()", "torch.nan_to_num(z, 0.0)", "z.abs().sqrt()")),
    lambda w: f"F.normalize(z, dim={w.dim()})",
    lambda w: "F.layer_norm(z, z.shape[-1:])",
    lambda w: f"z.cumsum({w.dim()})",
    lambda w: f"z.logcumsumexp({w.dim()})",
    lambda w: f"z.sort({w.dim()}).values",
    lambda w: "torch.where(z > 0, z, 0.1 * z)" if w.certain else "F.leaky_relu(z)",
    lambda w: "z.masked_fill(z < 0, 0.0)" if w.certain else "z",
    lambda w: "z + z",
    lambda w: "z * z",
    lambda w: w.choice(("z - z.detach()", "z * z.detach()", "z.detach() + z")),
    # (Of half-precision logits it is float32, docs/explanation/deferred_logits.md.)
    lambda w: "z.log_softmax(-1)" if w.z.dtype in HALVES else "z - z.logsumexp(-1, keepdim=True)",
    lambda w: f"z - z.max({w.dim()}, keepdim=True).values",
    lambda w: f"z - z.{w.choice(('amax', 'mean', 'sum'))}({w.dim()}, keepdim=True)",
    lambda w: "z / (z.norm(dim=-1, keepdim=True) + 1)",
    lambda w: "F.softmax(z, -1) * F.log_softmax(z, -1)",
    lambda w: "2 * z.softmax(-1) - z.log_softmax(-1).exp()",
]

CASTS: list[Entry] = [
    lambda w: f"z.to({w.choice(('f32', 'f64', 'bf16', 'f16'))})",
    lambda w: w.choice(("z.float()", "z.double()", "z.half()", "z.bfloat16()")),
    lambda w: f"z.to(device, {w.choice(('f32', 'f64'))})",
    lambda w: f"z.to({w.new((1,))})",
    lambda w: f"z.type_as({w.new((2,))})",
    lambda w: w.choice(("z.type(f32)", "z.to(dtype=f32, copy=True)", "z.to(device)", "z.to(z)")),
]

COPIES: list[Entry] = [
    lambda w: w.choice(("z.contiguous()", "z.clone()", "z.detach()", "z.data", "torch.clone(z)")),
    lambda w: w.choice(("z.view_as(z)", "z.expand_as(z)", "torch.as_tensor(z)")),
    lambda w: w.choice(("copy.copy(z)", "z.alias()", "z.positive()", "torch.ops.aten.clone(z)")),
    lambda w: f"tree_map(lambda u: {w.choice(('2 * u', '-u', 'u.tanh()', 'u[None]', 'u'))}, [z])[0]",
    lambda w: 'tree_map(lambda u: u.float(), {"logits": z, "loss": None})["logits"]',
    lambda w: "tree_leaves((z, [z]))[1]",
]


def in_place(w: Writer) -> str:
    """A statement. Only what broadcasts into the logits."""
    vector = w.choice((w.new(()), w.new((w.last,)), w.new(w.shape)))
    return w.choice(
        (
            *("z *= 0.5", "z /= 2", "z += 1", "z -= 0.25", "z.mul_(-1)", "z.tanh_()", "z.exp_()", "z.neg_()"),
            *(
                f"z += {vector}",
                f"z *= {vector}",
                f"z.add_({vector}, alpha=2)",
                f"z.div_({vector}.abs() + 1)",
            ),
            *("z[..., 0] = 0.0", "z[..., -1] = -1e4", "z[:1] = 2.0", "z.clamp_(-1, 1)", "z.fill_(1.0)"),
            f"z.masked_fill_({w.new(w.shape, 'b8')}, -5.0)",
            *("z[z < 0] = 0.0" if w.certain else "z.zero_()", "z.detach_()"),
        )
    )
