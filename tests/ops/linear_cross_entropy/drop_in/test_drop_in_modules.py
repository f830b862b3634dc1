"""In the place of torch.nn.functional.linear_cross_entropy (torch 2.13, without `options`): as a
module, in the place of torch.nn.LinearCrossEntropyLoss; and on torch's own samples.

Shapes: N rows, D features, V classes, d1 ... dK positions.
"""

import pytest
import torch
from torch import nn

import lowtide
from tests.ops.linear_cross_entropy.calls import (
    REDUCTIONS,
    D,
    V,
    check_same,
    make_call,
    needs_torchs_own,
    torchs_samples,
)

pytestmark = needs_torchs_own


@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)])
def test_modules(device, positions, bias, class_weight, probabilities):
    """With the parameters of torch's own, by load_state_dict."""
    arguments = make_call(positions, device=device, class_weight=class_weight, probabilities=probabilities)
    options = {"out_features": positions, "bias": bias, "weight": arguments["weight"], "label_smoothing": 0.1}
    options |= {"device": device, "dtype": torch.float64}
    theirs = nn.LinearCrossEntropyLoss(D, V, **options)
    ours = lowtide.LinearCrossEntropyLoss(D, V, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    losses = [module(arguments["input"], arguments["target"]) for module in (theirs, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    gradients = [
        torch.autograd.grad(loss, list(module.parameters())) for loss, module in zip(losses, (theirs, ours))
    ]
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (2, 3)])
def test_weight_shared_by_both_modules(device, positions, reduction):
    theirs = nn.LinearCrossEntropyLoss(
        D, V, out_features=positions, bias=True, reduction=reduction, ignore_index=1, device=device
    ).double()
    ours = lowtide.LinearCrossEntropyLoss(
        D, V, out_features=positions, bias=True, reduction=reduction, ignore_index=1, device=device
    ).double()
    ours.linear.weight, ours.linear.bias = theirs.linear.weight, theirs.linear.bias
    arguments = make_call(positions, device=device, ignored=1)
    both = []
    for module in (theirs, ours):
        loss = module(arguments["input"], arguments["target"])
        both.append((loss.detach(), *torch.autograd.grad(loss.sum(), list(module.parameters()))))
    for expected, found in zip(*both):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore")
def test_module_samples_of_torch(device):
    count = 0
    for sample in torchs_samples().sample_inputs(device, torch.float64, requires_grad=False):
        (linear_weight, target), options = sample.args, dict(sample.kwargs)
        if options.pop("options", None) is not None:
            continue
        arguments = {"input": sample.input, "linear_weight": linear_weight, "target": target}
        arguments |= {name: options.pop(name, None) for name in ("linear_bias", "weight")}
        check_same(arguments, **options)
        count += 1
    assert count > 10
