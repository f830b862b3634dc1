"""linear_log_probs: four results of each row, true gradients of three, however combined."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import lowtide
from tests.support.loss import (
    HALVES,
    check_log_probs,
    dense_log_probs,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
    norm,
    rows_for,
    skip_unless_runnable,
    smallest_workspace,
)

# Triton's interpreter computes with numpy, which warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.float32, torch.float64, *HALVES)
RESULTS = ("log_prob", "entropy", "logsumexp")
SUBSETS = [
    pytest.param(names, id=" and ".join(names))
    for count in (1, 2, 3)
    for names in itertools.combinations(RESULTS, count)
]

# The arguments of make_inputs, and the options of the call.
KINDS = {
    "plain": ({}, {}),
    "bias": ({"bias": True}, {}),
    "softcap": ({}, {"softcap": 1.5}),
    "scale": ({}, {"logit_scale": 1 / 0.7}),
    "all": ({"bias": True, "logit_scale": True}, {"softcap": 1.5}),
}


def upstream_of(names, inputs):
    """A gradient of each named result, as different as can be: its rows are random."""
    device = inputs.input.device
    return [torch.randn(inputs.leading, device=device) if name in names else None for name in RESULTS]


def check_fused(inputs, names=RESULTS, **options):
    upstream = upstream_of(names, inputs)
    check_log_probs(
        differentiate_log_probs(fused_log_probs, inputs, upstream, **options), inputs, upstream, **options
    )


def few_rows(inputs, **options):
    return 2 * smallest_workspace(lambda workspace: fused_log_probs(inputs, workspace=workspace, **options))


@pytest.mark.parametrize("workspace", ["default", "few"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("names", SUBSETS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(device, kind, names, dtype, workspace):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    for backend in ("auto", "torch") if device == "cuda" else ("torch",):
        chosen = options | {"backend": backend}
        bytes = few_rows(inputs, **chosen) if workspace == "few" else None
        check_fused(inputs, names, workspace=bytes, **chosen)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("names", SUBSETS)
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_triton(device, kind, names, dtype):
    skip_unless_runnable("triton", device)
    if device == "cpu" and dtype != torch.float32 and len(names) < 3:
        pytest.skip("slow in the interpreter")
    made, options = KINDS[kind]
    inputs = make_inputs(rows_for(device, dtype, 5), 3, 21, device=device, dtype=dtype, **made)
    check_fused(inputs, names, backend="triton", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_reference(device, kind):
    made, options = KINDS[kind]
    check_fused(make_inputs(device=device, dtype=torch.float64, **made), backend="reference", **options)


@pytest.mark.parametrize("name", ["input", "linear_weight", "linear_bias", "logit_scale"])
def test_gradient_of_one_operand(device, name):
    inputs = make_inputs(device=device, bias=True, logit_scale=True)
    frozen = {other: leaf.detach() for other, leaf in inputs.leaves().items() if other != name}
    check_fused(replace(inputs, **frozen), softcap=1.5)


@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_leading_dimensions(device, leading):
    N = math.prod(leading)
    inputs = make_inputs(N, 5, 7, device=device)
    x = inputs.input.detach().view(*leading, 5).requires_grad_()
    check_fused(replace(inputs, input=x, target=inputs.target.view(leading)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(63, 123, 507), (1, 19, 63), (37, 19, 1), (1, 1, 1), (None, 1, 2)])
def test_odd_sizes(device, sizes, dtype):
    check_fused(make_inputs(*sizes, device=device, dtype=dtype, bias=True, ignored=0.0))


@pytest.mark.parametrize("integer", [torch.uint8, torch.int32, torch.int64])
def test_integer_targets(device, integer):
    inputs = make_inputs(device=device, ignored=0.5, ignore_index=3)
    check_fused(replace(inputs, target=inputs.target.to(integer)), ignore_index=3)


# Rows.


@pytest.mark.parametrize("ignore_index", [None, -100, -1, 5, 63, -(2**40)])
def test_ignored_rows_values(device, ignore_index):
    index = -100 if ignore_index is None else ignore_index
    inputs = make_inputs(device=device, bias=True, ignored=0.5, ignore_index=index)
    ignored = inputs.target == index
    assert ignored.any()
    found = fused_log_probs(inputs, ignore_index=ignore_index)
    for part in found[:3]:
        assert torch.equal(part[ignored], torch.zeros_like(part[ignored]))
    assert found.argmax[ignored].eq(-1).all()
    assert found.argmax[~ignored].ge(0).all()
    result = differentiate_log_probs(
        fused_log_probs, inputs, upstream_of(RESULTS, inputs), ignore_index=ignore_index
    )
    assert result["input"][ignored].eq(0).all()
    assert result["input"][~ignored].ne(0).any(1).all()


def test_all_rows_ignored(device):
    inputs = make_inputs(device=device, bias=True, logit_scale=True, ignored=1.0)
    result = differentiate_log_probs(fused_log_probs, inputs, upstream_of(RESULTS, inputs))
    assert result.pop("argmax").eq(-1).all()
    for name, tensor in result.items():
        assert tensor.eq(0).all(), name


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_argmax_first_of_equal_logits(device, backend):
    skip_unless_runnable(backend, device)
    x = torch.tensor([[1.0], [-1.0], [0.0]], device=device)
    w = torch.tensor([[0.0], [2.0], [-1.0], [2.0], [-1.0]], device=device)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    found = lowtide.linear_log_probs(x, w, target, backend=backend)
    assert found.argmax.tolist() == [1, 2, 0]


def test_uniform_distribution(device):
    x, w = torch.zeros(4, 3, device=device), torch.randn(11, 3, device=device)
    found = lowtide.linear_log_probs(x, w, torch.arange(4, device=device))
    for part, value in zip(found, (-math.log(11), math.log(11), math.log(11), 0)):
        torch.testing.assert_close(part.double(), torch.full_like(part, value, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_masked_class(device, backend):
    """It adds 0 to the entropy, not 0 times infinity, and takes no gradient."""
    skip_unless_runnable(backend, device)
    inputs = make_inputs(7, 5, 11, device=device, bias=True, ignored=0.0)
    bias = inputs.linear_bias.detach().clone()
    bias[3] = -torch.inf
    target = inputs.target.masked_fill(inputs.target == 3, 4)
    inputs = replace(inputs, linear_bias=bias.requires_grad_(), target=target)
    upstream = upstream_of(RESULTS, inputs)
    result = differentiate_log_probs(fused_log_probs, inputs, upstream, backend=backend)
    kept = [v for v in range(11) if v != 3]
    others = replace(
        inputs,
        linear_weight=inputs.linear_weight.detach()[kept].requires_grad_(),
        linear_bias=bias.detach()[kept].requires_grad_(),
        target=target - (target > 3).long(),
    )
    for name in ("linear_weight", "linear_bias"):
        assert result[name][3].eq(0).all(), name
        result[name] = result[name][kept]
    result["argmax"] = result["argmax"] - (result["argmax"] > 3).long()
    check_log_probs(result, others, upstream)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scale", [50.0, 1e4])
def test_confident_rows(device, scale, backend):
    skip_unless_runnable(backend, device)
    check_fused(make_inputs(7, 5, 11, device=device, scale=scale), backend=backend)


# Results that log-probabilities consist of.


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_prob_matches_loss(device, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    found = fused_log_probs(inputs, softcap=2.0, logit_scale=0.8)
    loss = fused(inputs, softcap=2.0, logit_scale=0.8, reduction="none")
    assert found.log_prob.dtype == loss.dtype
    eps = torch.finfo(loss.dtype).eps
    assert norm(found.log_prob.detach() + loss.detach()) <= 4 * eps * norm(loss.detach())


def test_names_and_dtypes(device):
    found = fused_log_probs(make_inputs(device=device, dtype=torch.bfloat16))
    assert type(found) is lowtide.LogProbs
    assert found._fields == ("log_prob", "entropy", "logsumexp", "argmax")
    assert [part.dtype for part in found] == [torch.float32] * 3 + [torch.int64]
    assert [part.requires_grad for part in found] == [True, True, True, False]


def test_no_grad_same_values(device):
    inputs = make_inputs(device=device, bias=True)
    expected = fused_log_probs(inputs)
    with torch.no_grad():
        found = fused_log_probs(inputs)
    assert not any(part.requires_grad for part in found)
    for ours, theirs in zip(found[:3], expected[:3]):
        assert norm(ours - theirs.detach()) <= torch.finfo(torch.float32).eps * norm(theirs.detach())
    assert torch.equal(found.argmax, expected.argmax)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_retained_graph_exact(device, dtype):
    """The results one after the other, and together, from one graph."""
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    found, leaves = fused_log_probs(inputs), inputs.leaves()
    values = {name: part.detach() for name, part in zip(found._fields, found)}
    for names in (("entropy",), ("log_prob",), RESULTS, ("entropy",)):
        upstream = upstream_of(names, inputs)
        used = [(part, seed) for part, seed in zip(found, upstream) if seed is not None]
        outputs, seeds = zip(*used)
        gradients = torch.autograd.grad(outputs, tuple(leaves.values()), seeds, retain_graph=True)
        check_log_probs(values | dict(zip(leaves, gradients)), inputs, upstream)


def test_same_call_same_bits(device):
    inputs = make_inputs(device=device, dtype=torch.bfloat16, bias=True, logit_scale=True)
    upstream = upstream_of(RESULTS, inputs)
    first = differentiate_log_probs(fused_log_probs, inputs, upstream)
    again = differentiate_log_probs(fused_log_probs, inputs, upstream)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name


def test_policy_gradient(device):
    """What it is for: a clipped ratio, an entropy bonus and a penalty, in one backward."""
    inputs = make_inputs(device=device, dtype=torch.float64, bias=True)
    old, advantage = torch.randn(37, device=device).double(), torch.randn(37, device=device).double()
    gradients = []
    for log_probs_of in (fused_log_probs, dense_log_probs):
        log_prob, entropy, logsumexp, _ = log_probs_of(inputs, logit_scale=1.4)
        ratio = (log_prob - old).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = (-gain - 0.01 * entropy + 1e-3 * logsumexp**2).mean()
        gradients.append(torch.autograd.grad(loss, tuple(inputs.leaves().values())))
    for ours, theirs in zip(*gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
