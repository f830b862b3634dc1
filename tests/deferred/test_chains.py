"""Random chains of operations on the logits, recorded or not, and in any order: the numbers and
gradients are those of real ones."""

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F

import lowtide
from tests.deferred.helpers import differentiated, make, norm, plain_and_deferred
from tests.support.extended import all_extended_but


def ramp(z):
    return torch.linspace(0.5, 1, z.shape[-1], dtype=z.dtype)


def with_a_change(z):
    z = z * 1.0
    z[..., 0] = 0.0
    return z


def halved_in_place(z):
    z = z + 0.0
    z *= 0.5
    return z


def partly_without_gradient(z):
    with torch.no_grad():
        constant = z * 1.0
    return z + constant


def after_a_look(z):
    z.sin()
    return z


def deeper(z):
    return z if z.dim() > 3 else z[None]


STEPS = {
    "times": lambda z: z * 0.7,
    "times a tensor": lambda z: z * torch.tensor([1.5], dtype=z.dtype),
    "divided": lambda z: z / 1.3,
    "negative": lambda z: -z,
    "tanh": torch.tanh,
    "cap": lambda z: 5 * torch.tanh(z / 5),
    "bias": lambda z: z + ramp(z),
    "minus a bias": lambda z: z - ramp(z),
    "times a vector": lambda z: z * ramp(z),
    "plus a number": lambda z: z + 0.5,
    "twice": lambda z: z + z,
    "squared": lambda z: z * z,
    "exp": lambda z: (z * 0.1).exp(),
    "log_softmax": lambda z: z.log_softmax(-1),
    "softmax": lambda z: F.softmax(z, -1),
    "softmax of rows": lambda z: z.softmax(0),
    "half detached": lambda z: z + z.detach(),
    "partly without gradient": partly_without_gradient,
    "flat": lambda z: z.reshape(-1, z.shape[-1]),
    "transposed": lambda z: z.transpose(0, -2),
    "classes elsewhere": lambda z: z.transpose(-1, -2),
    "reversed": lambda z: z.permute(*reversed(range(z.dim()))),
    "rolled": lambda z: z.movedim(0, -1),
    "fewer rows": lambda z: z[1:] if len(z) > 1 else z,
    "fewer of the next": lambda z: z[:, :-1],
    "fewer classes": lambda z: z[..., :-1],
    "every other class": lambda z: z[..., ::2],
    "half of the classes": lambda z: z.chunk(2, -1)[0],
    "by indices": lambda z: z[torch.tensor([0, -1, 0])],
    "by a mask": lambda z: z[torch.arange(len(z)) % 2 == 0],
    "the first": lambda z: z[0] if z.dim() > 2 else z,
    "deeper": deeper,
    "unsqueezed": lambda z: z if z.dim() > 3 else z.unsqueeze(0),
    "squeezed": lambda z: z.squeeze(0),
    "copied": lambda z: z.contiguous().clone(),
    "stacked": lambda z: torch.stack(z.unbind(0)),
    "split": lambda z: z.split(2, 0)[0],
    "changed": with_a_change,
    "halved in place": halved_in_place,
    "looked at": after_a_look,
}
ENDS = {
    "sum": lambda z: z.sum(-1),
    "logsumexp": lambda z: z.logsumexp(-1),
    "of rows": lambda z: z.logsumexp(0),
    "cross_entropy": lambda z: F.cross_entropy(
        z.flatten(0, -2), torch.arange(z[..., 0].numel()) % z.shape[-1]
    ),
    "of the second": lambda z: F.cross_entropy(z, z.detach().argmin(1), reduction="none"),
    "probabilities": lambda z: F.cross_entropy(z, torch.full(z.shape, 1 / z.shape[1], dtype=z.dtype)),
    "gather": lambda z: z.gather(-1, torch.zeros(*z.shape[:-1], 1, dtype=torch.long)),
    "log-probability": lambda z: z.log_softmax(-1).gather(-1, torch.ones(*z.shape[:-1], 1, dtype=torch.long)),
    "largest": lambda z: z.topk(2, -1).values,
    "last class": lambda z: z[..., -1],
    "mean": lambda z: z.mean(),
}


@pytest.mark.parametrize("first", all_extended_but(range(0, 600, 150), range(0, 600, 50)))
def test_random_chains(first):
    warnings.simplefilter("ignore", UserWarning)
    for seed in range(first, first + 50):
        torch.manual_seed(seed)
        choose = random.Random(seed)
        names = choose.choices(sorted(STEPS), k=choose.randint(1, 5))
        end = choose.choice(sorted(ENDS))
        model, tokens, _ = make(bias=choose.random() < 0.5, tied=choose.random() < 0.5)

        def use(model, names=names, end=end, tokens=tokens):
            z = model(tokens)[0]
            for name in names:
                z = STEPS[name](z)
            return ENDS[end](z)

        expected, found, _ = plain_and_deferred(model, use)
        narrow = copy.deepcopy(model).float()
        for ours, want, eager in zip(found, expected, differentiated(narrow, use(narrow))):
            # The error of float32, scaled to float64; each of the two computations has an error of
            # its own.
            scaled = (
                norm(eager.double() - want) * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
            )
            allowed = 3 * scaled + 8 * torch.finfo(torch.float64).eps * norm(want)
            error = norm(ours - want)
            assert error <= allowed, f"seed {seed}: {', '.join(names)}; {end}: {error:.1e}, not {allowed:.1e}"


@pytest.mark.parametrize(
    "same", [lambda z: +z, torch.positive, lambda z: z.contiguous(), lambda z: z.flatten(0, 0)]
)
def test_what_torch_returns_as_it_is_keeps_its_gradient_under_no_grad(same):
    head, x = torch.nn.Linear(5, 7), torch.randn(3, 5)
    model = torch.nn.Sequential(head)
    target = torch.tensor([1, 0, 6])

    def gradient():
        z = model(x)
        with torch.no_grad():
            z = same(z)
        return torch.autograd.grad(F.cross_entropy(z, target), head.weight)[0]

    want = gradient()
    with lowtide.defer_logits(model, head=head) as deferral:
        torch.testing.assert_close(gradient(), want)
    assert deferral.fused == 1
