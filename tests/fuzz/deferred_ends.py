"""Last lines of a program: a loss, or any other number. Each is the right side of `r = ...`."""

from tests.fuzz.deferred_numbers import Entry
from tests.fuzz.deferred_writer import Writer

# The stride of a dimension of size 1 has no meaning, and torch's operations differ in it.
STRIDES = "[step for size, step in zip(z.shape, z.stride()) if size > 1]"


def _targets(w: Writer, shape: tuple[int, ...], classes: int) -> str:
    name = w.new(shape, f"{max(classes, 1)} i64")
    chosen = w.choice((name, name, f"{name}.masked_fill({name} == 0, -100)"))
    # The mean of a single ignored target is 0 in torch on CUDA, and NaN on the CPU and everywhere
    # else.
    return chosen if shape or w.draw.device == "cpu" else name


def _options(w: Writer, classes: int, target: str = "") -> str:
    texts = ['reduction="sum"', 'reduction="none"', "label_smoothing=0.1", ""]
    if "-100" not in target:  # with another ignore_index, -100 would be an invalid class
        texts.append("ignore_index=1")
    if w.draw.chance(0.2):
        texts = [f"weight={w.new((classes,), w.program.dtype, learned=False)}.abs()"]
    text = w.choice(texts)
    return f", {text}" if text else ""


def rows_loss(w: Writer) -> str:
    """The usual one: rows flattened, classes last."""
    rows = 1
    for size in w.shape[:-1]:
        rows *= size
    flat = w.choice(("z.reshape(-1, z.shape[-1])", "z.view(-1, z.size(-1))", "z.flatten(0, -2)"))
    flat = flat if len(w.shape) > 1 and rows else "z"
    shape = (rows,) if flat != "z" else w.shape[:-1]
    flat = w.choice((flat, flat, f"{flat}.float()"))
    target = _targets(w, shape, w.last)
    if w.draw.chance(0.2):
        return f"nn.CrossEntropyLoss()({flat}, {target})"
    if w.draw.chance(0.2):
        return f"F.nll_loss(F.log_softmax({flat}, -1), {target})"
    return f"F.cross_entropy({flat}, {target}{_options(w, w.last, target)})"


def any_loss(w: Writer) -> str:
    """Classes where torch expects them: in dimension 1, if there are rows."""
    shape = w.shape
    at = min(1, len(shape) - 1)
    classes = shape[at] if shape else 1
    rest = (*shape[:at], *shape[at + 1 :])
    if w.draw.chance(0.3):
        probabilities = w.new(shape, w.program.dtype, learned=False)
        return f"F.cross_entropy(z, {probabilities}.softmax({at}){_options(w, classes)})"
    target = _targets(w, rest, classes)
    return f"F.cross_entropy(z, {target}{_options(w, classes, target)})"


def transposed_loss(w: Writer) -> str:
    if len(w.shape) != 3:
        return any_loss(w)
    target = _targets(w, w.shape[:2], w.last)
    view = w.choice(("z.transpose(1, 2)", "z.permute(0, 2, 1)", "z.mT", "z.movedim(-1, 1)"))
    return f"F.cross_entropy({view}, {target}{_options(w, w.last, target)})"


def gathered(w: Writer) -> str:
    """Log-probabilities, as preference losses take them."""
    target = w.new(w.shape[:-1], f"{max(w.last, 1)} i64")
    logits = w.choice(("z.log_softmax(-1)", "z.float().log_softmax(-1)", "z", "F.log_softmax(z, dim=-1)"))
    return w.choice(
        (
            f"{logits}.gather(-1, {target}[..., None])",
            f"torch.gather({logits}, -1, {target}.unsqueeze(-1)).squeeze(-1)",
            f"torch.gather(z, -1, {target}[..., None])[..., 0] - z.logsumexp(-1)",
            f"{logits}.flatten(0, -2)[torch.arange({target}.numel()), {target}.flatten()]",
        )
    )


LOSSES: list[Entry] = [
    *(3 * [rows_loss]),
    any_loss,
    transposed_loss,
    *(2 * [gathered]),
    lambda w: f"F.kl_div(z.log_softmax(-1), {w.new(w.shape, learned=False)}.softmax(-1))",
    lambda w: f"F.mse_loss(z, {w.new(w.shape, w.program.dtype)})",
    lambda w: "-(z.softmax(-1) * z.log_softmax(-1)).sum(-1)",
    lambda w: "z.logsumexp(-1).square().mean()",
]


def _kept(w: Writer) -> str:
    return w.choice(("", "", ", keepdim=True", ", True"))


def _gathered(w: Writer, dim: int) -> str:
    """In range: on CUDA an index that is not ends the process, with or without lowtide."""
    return f"z.gather({dim}, {w.new(w.shape, 'i64')}.clamp(max=max(z.shape[{dim}] - 1, 0)))"


NUMBERS_OF: list[Entry] = [
    lambda w: f"z.{w.choice(('sum', 'mean'))}({w.choice(('', str(w.dim()), str(w.dims())))})",
    lambda w: f"z.{w.choice(('sum', 'mean', 'logsumexp', 'amax', 'amin'))}({w.dim()}{_kept(w)})",
    lambda w: f"torch.{w.choice(('sum', 'mean'))}(z, {w.choice(('-1', '(0, -1)'))}, dtype=f64)",
    lambda w: f"torch.logsumexp(z, {w.choice((w.dim(), w.dims()))}{_kept(w)})",
    lambda w: f"z.max({w.dim()}{_kept(w)}){w.choice(('.values', '[0]'))}",
    lambda w: w.choice(("z.max()", "torch.amax(z)", "z.min(-1).values", "z.median(-1).values")),
    lambda w: f"z.topk({w.draw.randint(0, w.last + (w.draw.chance(0.1)))}, {w.choice((-1, w.dim()))}).values",
    lambda w: f"torch.topk(z, 1, largest={w.choice(('True', 'False'))})[0]",
    lambda w: f"z.argmax({w.choice(('-1', str(w.dim()), ''))})",
    lambda w: f"z.topk(1, -1).indices + z.argmin({w.dim()}, keepdim=True)",
    lambda w: w.choice(("z.std(-1)", "z.var(-1)", "z.norm()", "z.prod(-1)", "z.square().sum()")),
    lambda w: _gathered(w, w.dim()),
    lambda w: w.choice(("len(z)", "z.numel()", "z.dim()", "z.size(-1)", "list(z.shape)", STRIDES)),
    lambda w: w.choice(("z.sum().item()", "float(z.sum())", "z.tolist()", "len(list(z))", "z.sum() > 0")),
    lambda w: w.choice(("(z > 0).sum()", "(z == z).all()", "bool((z != z).any())", "z.isnan().any()")),
    lambda w: w.choice(("z", "z.clone()", "z[..., -1]", "z.flatten()", "torch.as_tensor(z)")),
    lambda w: "sum(u.sum() for u in tree_leaves([z]))",
    lambda w: f"torch.{w.choice(('stack', 'cat'))}([z.sum(-1), z.amax(-1)])",
]
