"""Attention as a test sees it: inputs, the truth (all scores, float64), how large an error may be.

Shapes: B batches, M queries, N keys, H query heads, G key heads, K features, E of values.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.memory import Peak, peak_memory
from lowtide.ops.attention.definition.dropout import column_keys, keep_mask, row_keys
from lowtide.ops.attention.definition.intervals import visible
from lowtide.ops.attention.definition.masks import intervals, window_band
from tests.support.budgets import Result, budget, norm
from tests.support.loss import skip_unless_runnable

# NumPy's word for it: the lowest number times log2(e) is -inf, whose exponential is 0.
INTERPRETED = pytest.mark.filterwarnings("ignore:overflow encountered in multiply:RuntimeWarning")


@dataclass(frozen=True)
class Case:
    query: Tensor  # [B, M, H, K]
    key: Tensor  # [B, N, G, K]
    value: Tensor  # [B, N, G, E]
    bias: Tensor | None = None
    mask: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    """p, seed, softcap, scale, window."""

    def leaves(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("query", "key", "value", "bias")}
        return {name: leaf for name, leaf in named.items() if leaf is not None and leaf.requires_grad}

    def trained(self, *names: str) -> "Case":
        """The case itself, whose leaves of these names alone require a gradient from now on."""
        for name, leaf in self.leaves().items():
            leaf.requires_grad_(name in names)
        return self

    def to(self, dtype: torch.dtype) -> "Case":
        """New leaves with the same values."""

        def new(leaf: Tensor | None) -> Tensor | None:
            if leaf is None or leaf.dtype == torch.bool:
                return leaf
            return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

        names = ("query", "key", "value", "bias")
        return replace(self, **{name: new(getattr(self, name)) for name in names})

    @property
    def attn_bias(self) -> Any:
        if self.mask is None or self.bias is None:
            return self.bias if self.mask is None else self.mask
        return self.mask.add_bias(self.bias)

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.query.dtype, torch.float32)


def make_case(
    B: int = 2,
    M: int = 37,
    N: int = 53,
    H: int = 4,
    G: int | None = None,
    K: int = 8,
    E: int | None = None,
    *,
    bias: tuple[int, int, int, int] | None = None,
    mask: Any = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spread: float = 1.5,
    **options: Any,
) -> Case:
    """`bias`: which of its sizes are full (1) and which broadcast (0)."""
    G, E = H if G is None else G, K if E is None else E

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(device, dtype).requires_grad_()

    own = None
    if bias is not None:
        own = leaf(*(size if full else 1 for size, full in zip((B, H, M, N), bias)))
    return Case(leaf(B, M, H, K, scale=spread), leaf(B, N, G, K), leaf(B, N, G, E), own, mask, options)


def ours(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    return lowtide.memory_efficient_attention_with_lse(
        case.query, case.key, case.value, case.attn_bias, **case.options, **options
    )


def dense(case: Case, *, rounded: bool = False) -> tuple[Tensor, Tensor]:
    """The result, and the logsumexp in float32 or wider, from all scores in the inputs' dtype.

    `rounded`: float64 scores are rounded to float32."""
    query, key, value = (each.transpose(1, 2) for each in (case.query, case.key, case.value))
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    options = case.options
    scale = scale_of(case)
    z_BHMN = (query @ key.mT) * scale
    if (softcap := options.get("softcap")) is not None:
        z_BHMN = softcap * torch.tanh(z_BHMN / softcap)
    shown_BHMN = shown(case)
    if case.bias is not None and case.bias.dtype != torch.bool:
        z_BHMN = z_BHMN + case.bias
    if rounded:
        z_BHMN = z_BHMN + (z_BHMN.float().double() - z_BHMN).detach()
    z_BHMN = z_BHMN.masked_fill(~shown_BHMN, -torch.inf)
    nothing_BHM1 = (z_BHMN == -torch.inf).all(-1, keepdim=True)
    safe_BHMN = z_BHMN.masked_fill(nothing_BHM1, 0)
    weight_BHMN = safe_BHMN.softmax(-1).masked_fill(nothing_BHM1, 0)
    if options.get("p"):
        weight_BHMN = weight_BHMN * kept_scores(case) / (1 - options["p"])
    logsumexp_BHM = _logsumexp(safe_BHMN.to(case.sum_dtype)) if z_BHMN.shape[-1] else z_BHMN.sum(-1)
    logsumexp_BHM = logsumexp_BHM.masked_fill(nothing_BHM1[..., 0], -torch.inf)
    return (weight_BHMN @ value).transpose(1, 2), logsumexp_BHM


def scale_of(case: Case) -> float:
    scale = case.options.get("scale")
    return max(case.query.shape[-1], 1) ** -0.5 if scale is None else scale


def _logsumexp(z: Tensor) -> Tensor:
    """Return the logsumexp over the last dimension. The gradient of torch's own comes from its
    rounded result."""
    max_1 = z.detach().amax(-1, keepdim=True)
    return (z - max_1).exp().sum(-1).log() + max_1[..., 0]


def shown(case: Case) -> Tensor:  # [B or 1, H or 1, M, N]
    M, N = case.query.shape[1], case.key.shape[1]
    window = case.options.get("window")
    found = intervals(case.mask, None if window is None else window_band(window), M, N, case.query.device)
    seen = torch.ones(1, 1, M, N, dtype=torch.bool, device=case.query.device)
    if found is not None:
        seen = seen & visible(found, N)
    if case.bias is not None and case.bias.dtype == torch.bool:
        seen = seen & case.bias
    return seen


def kept_scores(case: Case) -> Tensor:  # [B, H, M, N]
    B, M, H, _ = case.query.shape
    seed = torch.tensor(case.options["seed"], device=case.query.device)
    rows = row_keys(seed, B, H, M)[..., None]
    return keep_mask(rows, column_keys(seed, case.key.shape[1]), case.options["p"])


def differentiate(
    function: Any, case: Case, upstream: tuple[Tensor | None, Tensor | None], **options: Any
) -> Result:
    out, logsumexp = function(case, **options)
    leaves = case.leaves()
    pairs = zip((out, logsumexp), upstream)
    used = [(got, seed) for got, seed in pairs if seed is not None and got.requires_grad]
    gradients = torch.autograd.grad(
        [got for got, _ in used],
        list(leaves.values()),
        [seed.to(got.dtype) for got, seed in used],
        materialize_grads=True,
        allow_unused=True,
    )
    return {"out": out.detach(), "logsumexp": logsumexp.detach(), **dict(zip(leaves, gradients))}


def make_upstream(case: Case) -> tuple[Tensor, Tensor]:
    """Upstream gradients of the result and the logsumexp, with 0 where the logsumexp is -inf."""
    B, M, H, _ = case.query.shape
    seen_BHM = (shown(case).any(-1)).expand(B, H, M)
    out = torch.randn(B, M, H, case.value.shape[-1]).to(case.query.device)
    return out, torch.randn(B, H, M).to(case.query.device) * seen_BHM


def check(
    actual: Result,
    case: Case,
    upstream: tuple[Tensor | None, Tensor | None],
    *,
    factor: float = 2.0,
) -> None:
    """Every part of `actual` has the right dtype and shape, and an error within its budget."""
    exact, eager, magnitude = references(case, upstream)
    assert actual.keys() == exact.keys()
    for name, got in actual.items():
        want = exact[name]
        dtype = case.sum_dtype if name == "logsumexp" else getattr(case, name, case.query).dtype
        assert got.dtype == dtype, f"{name} is {got.dtype}, not {dtype}"
        assert got.shape == want.shape, f"{name} is {list(got.shape)}, not {list(want.shape)}"
        assert torch.equal(got.isneginf(), want.isneginf()), f"{name}: other elements are -inf"
        finite = want.isfinite()
        assert got[finite].isfinite().all(), f"{name} is not finite"
        parts = (part.double().where(finite, 0) for part in (eager[name], want, magnitude[name]))
        allowed = budget(*parts, factor=factor, dtype=case.sum_dtype)
        error = norm((got.double() - want).where(finite, 0))
        assert error <= allowed, f"{name}: error {error:.3e} exceeds its budget {allowed:.3e}"


def check_triton(case: Case, upstream: tuple[Tensor | None, Tensor | None] | None = None) -> None:
    """Check what the Triton kernels compute. Skip the test where they do not run."""
    skip_unless_runnable("triton", case.query.device.type)
    upstream = make_upstream(case) if upstream is None else upstream
    check(differentiate(ours, case, upstream, backend="triton"), case, upstream)


def check_same_bits(case: Case, backend: str = "triton") -> None:
    """A call gives the same bits twice. Skips the test where the backend does not run."""
    skip_unless_runnable(backend, case.query.device.type)
    upstream = make_upstream(case)
    first, second = (differentiate(ours, case, upstream, backend=backend) for _ in range(2))
    assert_equal(second, first)


def assert_equal(found: Result, expected: Result) -> None:
    """Every part is the same, bit for bit."""
    for name, part in expected.items():
        assert torch.equal(found[name], part), name


def peak_of_backward(case: Case) -> tuple[Peak, int]:
    """What backward of the Triton kernels holds at most, and the bytes of the gradients in it."""
    skip_unless_runnable("triton", case.query.device.type)
    given = case.query, case.key, case.value, case.attn_bias
    out = lowtide.memory_efficient_attention(*given, backend="triton")
    leaves, upstream = list(case.leaves().values()), torch.ones_like(out)
    with peak_memory(case.query.device.type) as peak:
        torch.autograd.grad(out, leaves, upstream)
    return peak, sum(leaf.nbytes for leaf in leaves)


def poisoned(tensor: Tensor, how: str) -> Tensor:
    """The same values as a view into memory that is full of NaN."""
    if how == "expanded":
        return tensor[:1].expand_as(tensor)
    dims = tensor.dim()
    if how == "unaligned":
        memory = torch.full((tensor.numel() + 1,), torch.nan, dtype=tensor.dtype, device=tensor.device)
        view = memory[1:].view(tensor.shape)
    elif how == "reversed dimensions":
        view = torch.empty(*reversed(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        view = view.permute(*reversed(range(dims)))
    else:
        memory = torch.full([2 * size + 3 for size in tensor.shape], torch.nan, dtype=tensor.dtype)
        view = memory.to(tensor.device)[tuple(slice(2, 2 + 2 * size, 2) for size in tensor.shape)]
    return view.copy_(tensor)


def laid_out(case: Case, how: str) -> tuple[Case, tuple[Tensor, Tensor]]:
    """The case and an upstream gradient, with memory as `poisoned` lays it out."""
    leaves = {name: poisoned(leaf.detach(), how).requires_grad_() for name, leaf in case.leaves().items()}
    case = replace(case, **leaves)
    of_out, of_lse = make_upstream(case)
    return case, (poisoned(of_out, how), of_lse)


def references(case: Case, upstream: tuple[Tensor | None, Tensor | None]) -> tuple[Result, Result, Result]:
    """What a result is held against: the exact one, eager torch's, and magnitudes."""
    exact_case = case.to(torch.float64)
    eager_case = case.to(torch.float32) if case.query.dtype == torch.float64 else case
    exact = differentiate(dense, exact_case, upstream)
    eager = differentiate(dense, eager_case, upstream)
    return exact, eager, magnitudes(exact_case, upstream)


@torch.no_grad()
def magnitudes(case: Case, upstream: tuple[Tensor | None, Tensor | None]) -> Result:
    """The exact results with each term of their sums taken by absolute value; `case` in float64."""
    query, key, value = (each.transpose(1, 2) for each in (case.query, case.key, case.value))
    H, G = query.shape[1], key.shape[1]
    R = H // G if G else 1
    key, value = (each.repeat_interleave(R, 1) for each in (key, value))
    scale = abs(scale_of(case))
    softcap = case.options.get("softcap")
    p = case.options.get("p", 0.0)
    _, logsumexp_BHM = dense(case)
    z_BHMN = (query @ key.mT) * scale_of(case)
    slope = 1.0
    if softcap is not None:
        slope = 1 + torch.tanh(z_BHMN / softcap) ** 2
        z_BHMN = softcap * torch.tanh(z_BHMN / softcap)
    if case.bias is not None and case.bias.dtype != torch.bool:
        z_BHMN = z_BHMN + case.bias
    z_BHMN = z_BHMN.masked_fill(~shown(case), -torch.inf)
    weight_BHMN = (z_BHMN - logsumexp_BHM.nan_to_num(0, 0, 0)[..., None]).exp()
    # Scores that are off by a rounding move every weight by as much, relatively.
    size_BHMN = 1 + z_BHMN.abs().nan_to_num(0, 0, 0) + logsumexp_BHM.abs().nan_to_num(0, 0, 0)[..., None]
    weight_BHMN = weight_BHMN * size_BHMN
    drop = kept_scores(case) / (1 - p) if p else 1.0
    out = (weight_BHMN * drop) @ value.abs()
    of_out, of_lse = upstream
    do = torch.zeros_like(out) if of_out is None else of_out.double().transpose(1, 2).abs()
    dlse = torch.zeros_like(logsumexp_BHM) if of_lse is None else of_lse.double().abs()
    delta_BHM1 = (do * out).sum(-1, keepdim=True) + dlse[..., None]
    dz_BHMN = weight_BHMN * (do @ value.abs().mT * drop + delta_BHM1)
    ds_BHMN = dz_BHMN * slope * scale

    def grouped(each: Tensor) -> Tensor:
        return each.unflatten(1, (G, R)).sum(2).transpose(1, 2)

    found = {
        "out": out.transpose(1, 2),
        "logsumexp": size_BHMN.amax(-1) if z_BHMN.shape[-1] else logsumexp_BHM,
        "query": (ds_BHMN @ key.abs()).transpose(1, 2),
        "key": grouped(ds_BHMN.mT @ query.abs()),
        "value": grouped((weight_BHMN * drop).mT @ do),
    }
    if case.bias is not None:
        found["bias"] = dz_BHMN.sum_to_size(case.bias.shape)
    return found
