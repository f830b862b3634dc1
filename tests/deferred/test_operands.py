"""What logits are made of may change before they are made: then they are those of the old values,
or an error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.deferred.helpers import V, check, make

CHANGED = "changed in place since the head was called"


def step(model, rate=10.0):
    torch.optim.SGD(model.parameters(), lr=rate).step()


def loss_of(z, targets):
    return F.cross_entropy(z.reshape(-1, V), targets.reshape(-1), ignore_index=-1)


PARTS = {
    "all": lambda z: z.argmax(-1),
    "rows by a mask": lambda z: z[torch.ones(z.shape[:2], dtype=torch.bool)].argmax(-1),
    "rows by indices": lambda z: z[torch.tensor([0, 1])].argmax(-1),
    "the last": lambda z: z[:, -1].argmax(-1),
    "shifted": lambda z: z[:, :-1].logsumexp(-1),
    "some classes": lambda z: z[..., :9].argmax(-1),
    "transposed": lambda z: z.transpose(0, 1).argmax(-1),
    "flat": lambda z: z.view(-1, V).argmax(-1),
    "split": lambda z: z.split(2, 1)[0].argmax(-1),
    "selected": lambda z: z.select(1, 0).argmax(-1),
    "chosen classes": lambda z: z.view(-1, V)[torch.arange(4), torch.arange(4)],
    "a sum": lambda z: z.sum(-1),
    "of a scale": lambda z: (z * 2.0).argmax(-1),
}


@pytest.mark.parametrize("name", PARTS)
def test_slices_after_step(name):
    model, tokens, targets = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        loss_of(logits, targets).backward()
        step(model)
        with pytest.raises(RuntimeError, match=CHANGED):
            PARTS[name](logits)


class ByData(torch.optim.Optimizer):
    """Writes to the parameters' data, as optimizers with kernels of their own do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data.sub_(each.grad)


SILENT = {  # These leave the parameters' versions as they are.
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=10.0, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "by data": ByData,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("tied", [False, True])
def test_silent_step(name, grad, tied):
    model, tokens, targets = make(tied=tied)
    optimizer = SILENT[name](model.parameters())
    with lowtide.defer_logits(model):
        with torch.set_grad_enabled(grad):
            logits = model(tokens)[0]
        best = logits.argmax(-1)
        loss_of(model(tokens)[0], targets).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=CHANGED):
            logits.argmax(-1)
        with pytest.raises(RuntimeError, match=CHANGED):
            logits[:, 1:].log_softmax(-1)[..., 0].sum()
    assert best.shape == tokens.shape


@pytest.mark.parametrize("name", SILENT)
def test_silent_step_before_backward(name):
    """A loss is refused as after an optimizer that raises versions: its gradient would be wrong."""
    model, tokens, targets = make()
    optimizer = SILENT[name](model.parameters())
    with lowtide.defer_logits(model):
        kept = F.softplus(model(tokens)[0].logsumexp(-1)).sum()
        loss_of(model(tokens)[0], targets).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
            kept.backward()


@pytest.mark.parametrize("name", SILENT)
def test_silent_step_elsewhere(name):
    """A step without a gradient, or of another model, leaves the logits what they were."""
    model, tokens, targets = make()
    other = make()[0]
    expected = model(tokens)[0].logsumexp(-1).detach()
    with lowtide.defer_logits(model), lowtide.defer_logits(other):
        logits, kept = model(tokens)[0], other(tokens)[0]
        loss_of(kept, targets).backward()
        SILENT[name]([*model.parameters(), *other.parameters()]).step()
        torch.testing.assert_close(logits.logsumexp(-1), expected)
        with pytest.raises(RuntimeError, match=CHANGED):
            kept.logsumexp(-1)


@pytest.mark.parametrize("name", PARTS)
def test_slices_before_step(name):
    """A view of the hidden states or the weight is told from what it was; a copy is not."""
    model, tokens, targets = make()
    expected = PARTS[name](model(tokens)[0])
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        loss_of(logits, targets).backward()
        found = PARTS[name](logits)
        step(model)
    assert torch.equal(found, expected) or torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_hidden_changed():
    model, tokens, _targets = make()
    with lowtide.defer_logits(model):
        hidden = torch.tanh(model.wte(tokens)).detach()
        logits = model.lm_head(hidden)
        rows = logits[:, 1:]
        hidden.zero_()
        for each in (logits, rows):
            with pytest.raises(RuntimeError, match=CHANGED):
                loss_of(each, torch.zeros(each.shape[:2], dtype=torch.long))


def test_hidden_changed_in_inference_mode():
    """Their versions are not counted, so they are copied."""
    model, tokens, targets = make()
    with torch.inference_mode():
        hidden = torch.tanh(model.wte(tokens))
        expected = loss_of(model.lm_head(hidden), targets)
        with lowtide.defer_logits(model):
            logits = model.lm_head(hidden)
            hidden.zero_()
            torch.testing.assert_close(loss_of(logits, targets), expected, rtol=1e-12, atol=0)


def filled_again(z, dtype):
    """One buffer of a mask, for several calls."""
    mask, losses = torch.zeros(V, dtype=dtype), []
    for first in (0, 1):
        mask.zero_()
        mask[first] = -50.0
        losses.append(z + mask)
    return sum(each.logsumexp(-1).sum() for each in losses)


def refilled_number(z, dtype):
    factor = torch.tensor(2.0, dtype=dtype)
    scaled = z * factor
    factor.fill_(-7.0)
    return scaled.logsumexp(-1).sum()


def refilled_row(z, dtype):
    factor = torch.full((1, 1), 2.0, dtype=dtype)
    scaled = z / factor
    factor.fill_(-7.0)
    return scaled.logsumexp(-1).sum()


def exchanged_data(z, dtype):
    prior = torch.linspace(-1, 1, V, dtype=dtype)
    shifted = z - prior
    prior.data = torch.full((V,), 100.0, dtype=dtype)
    return F.cross_entropy(shifted.view(-1, V), torch.arange(V)[: z[..., 0].numel()])


def changed_bias(z, dtype):
    """Of another kind: a vector that is differentiated."""
    prior = torch.linspace(-1, 1, V, dtype=dtype).requires_grad_()
    own = prior * 1.0
    shifted = z + own
    with torch.no_grad():
        own.mul_(3)
    return shifted.logsumexp(-1).sum()


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize(
    "use",
    [filled_again, refilled_number, refilled_row, exchanged_data, changed_bias],
    ids=lambda f: f.__name__,
)
def test_operands_as_recorded(use):
    model, tokens, _ = make()
    expected = use(model(tokens)[0], torch.float64)
    with lowtide.defer_logits(model):
        torch.testing.assert_close(use(model(tokens)[0], torch.float64), expected, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("error::lowtide.deferred.RealLogitsWarning")
def test_fake_operand():
    """A bias without data is recorded like one with data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden, bias = torch.randn(8, 4), torch.randn(1, V)
        head = nn.Linear(4, V, bias=False)
        with lowtide.defer_logits(head, head=head):
            logits = head(hidden) + bias
            assert F.cross_entropy(logits, torch.zeros(8, dtype=torch.long)).shape == ()


def test_temperature_changed_by_step():
    model, tokens, targets = make()

    def use():
        temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        z = model(tokens)[0] / temperature
        loss_of(z, targets).backward()
        torch.optim.SGD([temperature], lr=10.0).step()
        return z.logsumexp(-1).sum()

    expected = use()
    with lowtide.defer_logits(model):
        torch.testing.assert_close(use(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_data_exchanged(which, frozen):
    """As for an evaluation with averaged weights."""
    model, tokens, targets = make(bias=True)
    model.lm_head.requires_grad_(not frozen)
    parameter = getattr(model.lm_head, which)

    def use(model):
        logits, own = model(tokens)[0], parameter.data
        parameter.data = 2 * own + 1
        loss = loss_of(logits, targets)
        parameter.data = own
        return loss

    check(model, use)


def test_data_of_logits_exchange_refused():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        with pytest.raises(RuntimeError, match=r"take logits.materialize\(\) first"):
            logits.data = torch.zeros(logits.shape)
        assert not logits.data.requires_grad


def test_step_of_a_sparse_parameter():
    """It has no memory that logits could be made of."""
    model, tokens, _ = make()
    sparse = torch.eye(3).to_sparse().requires_grad_()
    sparse.grad = torch.eye(3).to_sparse()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        torch.optim.SGD([sparse], lr=1.0).step()
        assert torch.equal(sparse.detach().to_dense(), torch.zeros(3, 3))
        assert logits.logsumexp(-1).isfinite().all()
