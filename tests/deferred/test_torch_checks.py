"""Where torch raises, deferred logits raise; where torch answers, they answer the same."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.deferred import RealLogitsWarning
from tests.deferred.helpers import B, T, V, make

REFUSED = {
    "argmax": lambda z: z.argmax(5),
    "softmax": lambda z: z.softmax(5),
    "log_softmax": lambda z: F.log_softmax(z, -4),
    "logsumexp": lambda z: z.logsumexp(-7),
    "sum": lambda z: z.sum(8),
    "mean": lambda z: z.mean(3),
    "max": lambda z: z.max(3),
    "amax": lambda z: z.amax(-4),
    "topk": lambda z: z.topk(2, 3),
    "topk of too many": lambda z: z.topk(V + 1),
    "gather": lambda z: z.gather(3, torch.zeros(B, T, 1, dtype=torch.long)),
    "gather of no class": lambda z: z.gather(-1, torch.full((B, T, 1), V)),
    "gather by narrow integers": lambda z: z.gather(-1, torch.zeros(B, T, 1, dtype=torch.int16)),
    "select": lambda z: z.select(5, 0),
    "select beyond": lambda z: z.select(1, T),
    "narrow beyond": lambda z: z.narrow(1, T - 1, 2),
    "narrow of another dimension": lambda z: z.narrow(3, 0, 1),
    "split": lambda z: z.split([1, 1], 1),
    "split of another dimension": lambda z: z.split(1, 3),
    "unbind": lambda z: z.unbind(3),
    "chunk": lambda z: z.chunk(2, -4),
    "transpose": lambda z: z.transpose(0, 3),
    "flatten": lambda z: z.flatten(0, 3),
    "view": lambda z: z.transpose(0, 1).view(-1, V),
    "a row beyond": lambda z: z[B],
    "too many indices": lambda z: z[0, 0, 0, 0],
    "two ellipses": lambda z: z[..., ..., 0],
    "a step backwards": lambda z: z[:, ::-1],
    "a mask of another shape": lambda z: z[torch.ones(B + 1, dtype=torch.bool)],
    "a wrong keyword": lambda z: z.softmax(-1, 3, 4, 5),
    "a vector of another length": lambda z: z + torch.ones(V - 1, dtype=z.dtype),
    "targets of another dtype": lambda z: F.cross_entropy(
        z.view(-1, V), torch.zeros(B * T, dtype=torch.int32)
    ),
    "targets beyond": lambda z: F.cross_entropy((z * z).view(-1, V), torch.full((B * T,), V)),
    "a name of a type": lambda z: z.type("torch.Nothing"),
    "one of several views": lambda z: z.split(1, 1)[0].fill_(0),
    "one of several rows": lambda z: z.unbind(0)[0].mul_(2),
}
SAME = {
    "narrow from the end": lambda z: z.narrow(1, -2, 2).logsumexp(-1),
    "narrow by a tensor": lambda z: z.narrow(1, torch.tensor(1), 2).logsumexp(-1),
    "select from the end": lambda z: z.select(-2, -1).logsumexp(-1),
    "nested lists": lambda z: z[[[0, 1], [1, 2]]].sum(-1),
    "a list": lambda z: z[[0, 2]].logsumexp(-1),
    "a list of truth values": lambda z: z[[True, False, True]].logsumexp(-1),
    "a list of both": lambda z: z[[True, 0, 1]].logsumexp(-1),
    "bytes": lambda z: z.view(-1, V)[torch.arange(B * T) % 2 == 0].logsumexp(-1),
    "an array": lambda z: z[np.array([0, 2])].logsumexp(-1),
    "None": lambda z: z[:, None].logsumexp(-1),
    "True": lambda z: z[True].logsumexp(-1),
    "a truth value": lambda z: z[torch.tensor(True)].logsumexp(-1),
    "classes from the end": lambda z: z.view(-1, V)[torch.arange(4), torch.tensor([-1, 0, -V, 5])],
    "classes from the end, narrow integers": lambda z: z.log_softmax(-1).view(-1, V)[
        torch.arange(4), torch.tensor([-1, 0, -V, 5], dtype=torch.int32)
    ],
    "no class": lambda z: z[..., :0].logsumexp(-1),
    "no row": lambda z: z[:0].logsumexp(-1),
    "a name of a type": lambda z: z.type("torch.FloatTensor").logsumexp(-1),
    "a NumPy number on the left": lambda z: (np.float32(2) * z).logsumexp(-1),
    "a copy": lambda z: z.to(z.dtype, copy=True).logsumexp(-1),
    "rows of one dimension": lambda z: z[0, 0].logsumexp(-1) + z[0, 0].argmax(-1) + z[0, 0].max(-1)[0],
    "a class of one row": lambda z: z[0, 0].log_softmax(-1).gather(-1, torch.tensor([3])),
    "in place after no_grad": lambda z: (z.detach() + 0.0).mul_(2).logsumexp(-1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_of_torch(name):
    model, tokens, _ = make()
    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as refused:
        REFUSED[name](model(tokens)[0])
    with lowtide.defer_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        with pytest.raises(refused.type):
            REFUSED[name](model(tokens)[0])


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("name", SAME)
def test_checks_of_torch(name):
    model, tokens, _ = make(bias=True)
    expected = SAME[name](model(tokens)[0])
    with lowtide.defer_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        found = SAME[name](model(tokens)[0])
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    tolerance = 1e-12 if expected.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_type_name():
    model, tokens, _ = make()
    with lowtide.defer_logits(model), pytest.warns(RealLogitsWarning):
        assert model(tokens)[0].type() == "torch.DoubleTensor"


@pytest.mark.parametrize("read", [torch.as_tensor, torch.tensor, torch.asarray], ids=lambda f: f.__name__)
def test_read_of_numbers_refused_with_gradient(read):
    model, tokens, _ = make()
    with lowtide.defer_logits(model), pytest.raises(RuntimeError, match=r"pass logits.materialize\(\)"):
        read(model(tokens)[0])


@pytest.mark.parametrize("read", [torch.as_tensor, torch.from_dlpack, np.asarray], ids=lambda f: f.__name__)
def test_read_of_numbers_no_grad(read):
    model, tokens, _ = make()
    expected = model(tokens)[0].detach()
    with lowtide.defer_logits(model), pytest.warns(RealLogitsWarning):
        found = read(model(tokens)[0].detach())
    assert torch.equal(torch.as_tensor(found), expected)


def test_namesake_of_other_library_materializes():
    """Functions are told by what they are, not by their names alone."""

    def softmax(input, dim=None):
        if torch.overrides.has_torch_function_unary(input):
            return torch.overrides.handle_torch_function(softmax, (input,), input, dim=dim)
        return input * 7

    model, tokens, _ = make()
    expected = softmax(model(tokens)[0], dim=-1)
    with lowtide.defer_logits(model), pytest.warns(RealLogitsWarning, match="softmax"):
        assert torch.equal(softmax(model(tokens)[0], dim=-1), expected)
