"""Results with a number for each row are no views: a change in place keeps what hangs on them."""

import itertools

import pytest
import torch

import lowtide


@pytest.mark.parametrize(
    ("name", "leading"),
    [*itertools.product(("loss", "log_probs", "probabilities"), [(), (5,), (2, 3)]), ("positions", (5,))],
)
def test_result_changed_in_place(device, name, leading):
    D, V = 8, 21
    hidden = torch.randn(*leading, D, device=device, requires_grad=True)
    weight = torch.randn(V, *[3] * (name == "positions"), D, device=device, requires_grad=True)
    rows = (*leading, 3) if name == "positions" else leading
    target = torch.randint(V, rows, device=device)
    if name == "probabilities":
        target = torch.rand(*leading, V, device=device)

    def results():
        if name == "log_probs":
            return lowtide.linear_log_probs(hidden, weight, target)[:3]
        return [lowtide.linear_cross_entropy(hidden, weight, target, reduction="none")]

    factor = torch.rand(rows, device=device)
    given = [hidden, weight]
    expected = [torch.autograd.grad((each * factor).sum(), given, retain_graph=True) for each in results()]
    for _ in range(3):  # later calls are remembered
        for result, gradients in zip(results(), expected):
            assert not result._is_view()
            seen = []
            result.register_hook(seen.append)
            result *= factor
            found = torch.autograd.grad(result.sum(), given, retain_graph=True)
            assert torch.equal(seen[0], factor)
            assert all(map(torch.equal, found, gradients))
