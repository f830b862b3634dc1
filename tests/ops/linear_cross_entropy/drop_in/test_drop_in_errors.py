"""In the place of torch.nn.functional.linear_cross_entropy (torch 2.13, without `options`): what it
refuses is refused, by an error that is caught as its own would be.

Shapes: N rows, D features, V classes, d1 ... dK positions.
"""

import fractions

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lowtide
from tests.ops.linear_cross_entropy.calls import D, N, V, check_error, needs_torchs_own, torchs_samples

pytestmark = needs_torchs_own

x, w, t = torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,))
w_K, t_K = torch.randn(V, 2, 3, D), torch.randint(V, (N, 2, 3))
p, ones = torch.rand(N, V), torch.ones(V)

REFUSED = {
    "0-d input": {"input": x[0, 0]},
    "weight 1-d": {"linear_weight": w[0]},
    "weight transposed": {"linear_weight": w.t()},
    "other features": {"input": x[:, :-1]},
    "target too short": {"target": t[:-1]},
    "target too long": {"target": torch.zeros(N + 1).long()},
    "target 2-d": {"target": t[:, None]},
    "target 0-d": {"target": t[0]},
    "target of one where there is one class": {"input": x[0], "linear_weight": w[:1], "target": t[:1] * 0},
    "target of two without a batch": {"input": x[0], "target": t[:2]},
    "target of [1, 1] without a batch": {"input": x[0], "target": t[:1, None]},
    "target of one float without a batch": {"input": x[0], "target": x[0, :1]},
    "a class among none": {"linear_weight": w[:0]},
    "probabilities too short": {"target": p[:-1]},
    "probabilities of other classes": {"target": p[:, :-1]},
    "probabilities of integers": {"target": p.long()},
    "probabilities of booleans": {"target": p > 0.5},
    "probabilities that are complex": {"target": p + 0j},
    "probabilities and ignore_index": {"target": p, "ignore_index": -100},
    "float target": {"target": t.float()},
    "int16 target": {"target": t.short()},
    "bool target": {"target": t > 0},
    "bias too short": {"linear_bias": ones[:-1]},
    "bias 2-d": {"linear_bias": ones[None]},
    "class weights too long": {"weight": torch.ones(V + 1)},
    "class weights 2-d": {"weight": ones[None]},
    "class weights 0-d": {"weight": ones[0]},
    "class weights beside probabilities, too long": {"target": p, "weight": torch.ones(V + 1)},
    "class weights beside probabilities, 2-d": {"target": p, "weight": ones[None]},
    "class weights that need a gradient": {"weight": torch.ones(V, requires_grad=True)},
    "weight in float64": {"linear_weight": w.double()},
    "bias in float64": {"linear_bias": ones.double()},
    "integer input": {"input": x.long(), "linear_weight": w.long()},
    "complex input": {"input": x + 0j, "linear_weight": w + 0j},
    "class too large": {"target": torch.full((N,), V)},
    "class below 0": {"target": torch.full((N,), -1)},
    "-100 where another is ignored": {"target": torch.full((N,), -100), "ignore_index": 0},
    "reduction": {"reduction": "avg"},
    "reduction None": {"reduction": None},
    "smoothing above 1": {"label_smoothing": 1.1},
    "smoothing infinite": {"label_smoothing": float("inf")},
    "smoothing a fraction": {"label_smoothing": fractions.Fraction(1, 10)},
    "smoothing a vector": {"label_smoothing": torch.tensor([0.1])},
    "smoothing that needs a gradient": {"label_smoothing": torch.tensor(0.1, requires_grad=True)},
    "smoothing a string": {"label_smoothing": "0.1"},
    "smoothing None": {"label_smoothing": None},
    "ignore_index a float": {"ignore_index": 1.0},
    "ignore_index a bool": {"ignore_index": True},
    "ignore_index a bool tensor": {"ignore_index": torch.tensor(True)},
    "ignore_index a float tensor": {"ignore_index": torch.tensor(1.0)},
    "ignore_index a NumPy bool": {"ignore_index": np.True_},
    "ignore_index a NumPy float": {"ignore_index": np.float32(1)},
    "ignore_index an array of one": {"ignore_index": np.array([1])},
    "ignore_index a fraction": {"ignore_index": fractions.Fraction(1)},
    "ignore_index a string": {"ignore_index": "1"},
    "ignore_index beyond 64 bits": {"ignore_index": 2**63},
    "K: unbatched": {"input": x[0], "linear_weight": w_K, "target": t_K[0]},
    "K: target without positions": {"linear_weight": w_K},
    "K: target of other positions": {"linear_weight": w_K, "target": t_K[..., :-1]},
    "K: target transposed": {"linear_weight": w_K, "target": t_K.transpose(1, 2)},
    "K: probabilities with classes last": {"linear_weight": w_K, "target": torch.rand(N, 2, 3, V)},
    "K: bias without positions": {"linear_weight": w_K, "target": t_K, "linear_bias": ones},
    "K: bias flat": {"linear_weight": w_K, "target": t_K, "linear_bias": torch.ones(6 * V)},
    "K: class too large": {"linear_weight": w_K, "target": t_K + V},
    "K: other features": {"linear_weight": w_K[..., :-1], "target": t_K},
    "K: class weights too long": {"linear_weight": w_K, "target": t_K, "weight": torch.ones(V + 1)},
    "K: float target": {"linear_weight": w_K, "target": t_K.float()},
    "K: a class among none": {"linear_weight": w_K[:0], "target": t_K},
    "K: ignored among none": {"linear_weight": w_K[:0, 0], "target": torch.full((N, 3), -100)},
    "K: reduction": {"linear_weight": w_K, "target": t_K, "reduction": "avg"},
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_errors_match_torch(what):
    arguments = {"input": x, "linear_weight": w, "target": t} | REFUSED[what]
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        F.linear_cross_entropy(**arguments)
    check_error(theirs.value, arguments)


@pytest.mark.filterwarnings("ignore")
def test_errors_of_torch_samples(device):
    op = torchs_samples()
    if op.error_inputs_func is None:
        pytest.skip("torch has no error samples of it")
    count = 0
    for error in op.error_inputs(device):
        sample = error.sample_input
        if sample.kwargs.get("options") is not None:
            continue
        with pytest.raises(error.error_type):
            lowtide.linear_cross_entropy(
                sample.input, *sample.args, **{k: v for k, v in sample.kwargs.items() if k != "options"}
            )
        count += 1
    assert count > 0
