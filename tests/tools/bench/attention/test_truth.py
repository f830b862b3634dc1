"""What attention's benchmark compares with, held against autograd with all scores in float64."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch

from lowtide.tools.bench.attention import truth
from lowtide.tools.bench.attention.real import REAL_CASES
from lowtide.tools.bench.truth import relative_error
from tests.tools.bench.attention.test_rows import CASES

PUBLIC = [case for case in REAL_CASES if not case.smoke]
SMOKE = [case for case in REAL_CASES if case.smoke]
BY_NAME = {case.name: case for case in REAL_CASES}


def visible(case):
    """The keys that a query sees, in words: bool [B, M, N]."""
    shown = torch.zeros(case.B, case.M, case.keys, dtype=torch.bool)
    starts = [sum(case.lengths[:number]) for number in range(len(case.lengths) + 1)]
    for b in range(case.B):
        for i in range(case.M):
            own = i + case.keys - case.M  # the key at the query's place, counted from the end
            for j in range(case.keys):
                sees = not case.causal or j <= own
                if case.window:
                    left, right = case.window
                    sees = sees and own - left <= j <= own + right
                if case.lengths:
                    sees = sees and any(a <= i < z and a <= j < z for a, z in pairwise(starts))
                if case.padded:
                    sees = sees and j < case.valid_keys[b]
                shown[b, i, j] = sees
    return shown


def results_of_autograd(case, inputs):
    """The definition in float64, with all scores."""
    wide = [None if each is None else each.detach().double() for each in inputs]
    leaves = [
        tensor.requires_grad_() for tensor, own in zip(wide, inputs) if own is not None and own.requires_grad
    ]
    query, key, value, bias, upstream, sink = wide
    key, value = (each.repeat_interleave(case.H // case.key_heads, 2) for each in (key, value))
    score = torch.einsum("bihk,bjhk->bhij", query, key) / math.sqrt(case.K)
    if case.softcap:
        score = case.softcap * torch.tanh(score / case.softcap)
    if bias is not None:
        score = score + bias
    score = score.masked_fill(~visible(case)[:, None], -torch.inf)
    total = score.exp().sum(-1)
    if sink is not None:
        total = total + sink.exp()[:, None]
    out = torch.einsum("bhij,bjhe->bihe", score.exp() / total[..., None], value)
    gradients = torch.autograd.grad(out, leaves, upstream) if leaves else ()
    return out.detach(), *gradients


@pytest.mark.parametrize("queries", [None, 5], ids=["at once", "in chunks"])
@pytest.mark.parametrize("case", [*CASES, *SMOKE], ids=lambda case: case.name)
def test_truth_of_every_option(case, queries, monkeypatch):
    if queries is not None:
        monkeypatch.setattr(truth, "SCORES", queries * case.H * case.keys)
    inputs = case.inputs()
    wants = results_of_autograd(case, inputs)
    assert len(case.results) == len(wants)
    for name, got, want in zip(case.results, truth.exact(case, inputs), wants, strict=True):
        assert got.shape == want.shape, name
        assert relative_error(got, want) < 1e-14, name


def test_truth_is_float64_where_affordable():
    assert {truth.truth_dtype(case) for case in PUBLIC} == {torch.float64}
    long = dataclasses.replace(BY_NAME["gqa-8"], M=1 << 15)
    assert truth.truth_dtype(long) is torch.float32, "a day's work in float64"
    assert truth.truth_dtype(dataclasses.replace(long, dtype=torch.float32)) is torch.float64


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.name)
def test_pairs_are_counted(case):
    """Of a causal mask half of each query's own key counts: it halves a square exactly."""
    seen = visible(case).sum().item() / case.B
    if case.causal and not case.padded:
        seen -= case.M / 2
    assert case.pairs == pytest.approx(seen, rel=0.05 if case.padded else 0)
    assert case.forward_flops == 2 * case.B * case.H * case.pairs * (case.K + case.value_features)
