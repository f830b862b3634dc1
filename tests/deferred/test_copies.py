"""A change of a copy of deferred logits changes no other logits, and is no error there; a change of
a view changes them.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

import lowtide
from tests.deferred.helpers import B, T, V, make, plain_and_deferred
from tests.ops.chunked_loss.helpers import close

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")

COPIES = {
    "clone": lambda z: z.clone(),
    "to with copy": lambda z: z.to(z.dtype, copy=True),
    "to with copy by place": lambda z: z.to(z.dtype, False, True),
    "a cast": lambda z: z.to(torch.float32),
    "a product": lambda z: z * 2,
    "rows by a mask": lambda z: z[torch.arange(B * T).view(B, T) % 2 == 0],
    "rows by an index": lambda z: z[[2, 0]],
    "a row of each sequence": lambda z: z[torch.arange(B), -1],
    "contiguous": lambda z: z[:, :-1].contiguous(),
    "reshape": lambda z: z[:, 1:].reshape(-1, V),
    "flatten": lambda z: z.transpose(0, 1).flatten(0, 1),
}


@pytest.mark.parametrize("name", COPIES)
def test_change_of_a_copy(name):
    """The copy is changed in place, as for sampling, and the loss is of the logits as they were."""
    model, tokens, targets = make()

    def use(model):
        logits = model(tokens)[0]
        copied = COPIES[name](logits)
        copied[..., 3] = -100
        loss = F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)
        return loss + copied.double().square().mean()

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected)


def test_copy_of_changed_logits():
    """A copy that is recorded after a change of a view is not one of the old values."""
    model, tokens, _ = make()

    def use(model):
        logits = model(tokens)[0]
        turned, view = logits.transpose(0, 1), logits[:, :3]
        view.mul_(3)
        return turned.contiguous().square().mean() + turned.reshape(-1, V).mean()

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected)


def test_change_of_the_logits_themselves():
    """Results computed before the change keep their values; a view changes with the logits."""
    model, tokens, _ = make()

    def use(model):
        logits = model(tokens)[0]
        view, doubled = logits[..., :5], logits * 2
        logits.mul_(3)
        return doubled.sum() + logits.square().sum() + view.exp().sum()

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected)


def scaled_and_shifted(z):
    same = z
    same *= torch.tensor(2.0, dtype=z.dtype)
    z.sub_(1)
    z += torch.linspace(0, 1, V, dtype=z.dtype)
    return z


def capped_in_place(z):
    return (z.tanh_() * 5).neg_()


def read_before_and_after(z):
    kept = z.log_softmax(-1)
    z /= 0.7
    return z + 2 * kept


@pytest.mark.parametrize(
    "change", [lambda z: z.div_(0.7), scaled_and_shifted, capped_in_place, read_before_and_after]
)
def test_change_recorded(change):
    """Logits that share their memory with no others stay deferred: `logits /= temperature`."""
    model, tokens, targets = make()

    def use(model):
        return F.cross_entropy(change(model(tokens)[0]).flatten(0, 1), targets.flatten(), ignore_index=-1)

    expected, found, deferral = plain_and_deferred(model, use)
    assert (deferral.fused, deferral.materialized) == (1, {})
    close(found, expected)


def beside_a_view(z):
    view = z[:, 1:]
    z *= 2
    return z.logsumexp(-1).sum() + view.logsumexp(-1).sum()


def numbers_alone(z):
    with torch.no_grad():
        z *= 2
    return z.logsumexp(-1).sum()


@pytest.mark.parametrize(
    "use", [beside_a_view, numbers_alone, lambda z: z.add_(1, alpha=2).logsumexp(-1).sum()]
)
def test_change_made_real(use):
    model, tokens, _ = make()
    expected, found, deferral = plain_and_deferred(model, lambda model: use(model(tokens)[0]))
    assert sum(deferral.materialized.values()) == 1
    close(found, expected)


@pytest.mark.parametrize("make_real", [lambda z: z.relu_(), lambda z: z.requires_grad_()])
def test_change_by_real_logits(make_real):
    """An operand that is a tensor by now is not recorded: it has other numbers, or is a leaf."""
    model, tokens, _ = make()

    def use(model):
        logits = model(tokens)[0]
        other = logits.detach().clone()
        make_real(other)
        logits += other
        if other.requires_grad:
            logits.logsumexp(-1).sum().backward(retain_graph=True)
            logits = logits * other.grad
        return logits.logsumexp(-1).sum()

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected)


def test_change_after_another_form_refused():
    """Its tensor, which code may still hold, would have to change too."""
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        seen = logits.detach().materialize()
        with pytest.raises(RuntimeError, match="other forms have been made already"):
            logits *= 2
    assert seen.shape == (B, T, V)


def bias_of_some_classes(z):
    z[..., :5] += 0.25


def temperature_of_a_row(z):
    z[:, -1] /= 0.7


def rows_by_mask(z):
    z[torch.arange(B * T).view(B, T) % 3 == 0] *= 0


def views_of_views(z):
    turned = z.transpose(0, 1)
    turned[1:, 0].narrow(-1, 3, 4).div_(0.7)
    turned[2, 1, 5:] -= 1
    z.view(-1, V)[3].mul_(turned[0, 0].clone())


def rows_of_themselves(z):
    z[0] = z[1]


def without_gradients(z):
    with torch.no_grad():
        z[..., :3] -= 1


def detached(z):
    z.data.div_(0.7)
    z.detach()[1:, :, 2] *= 2


def some_after_reading_all(z):
    row = z[:, 2]
    z.sin()
    row *= 2


def twice(z):
    row = z[:, 2]
    for _ in range(2):
        row *= 2
        z[..., 1] += 1


def by_option(z):
    F.relu(z[:, 1:], inplace=True)


def view_of_real_logits(z):
    z[..., 3].mul_(0.7)


CHANGES = (
    *(by_option, view_of_real_logits),
    *(bias_of_some_classes, temperature_of_a_row, rows_by_mask, views_of_views, rows_of_themselves),
    *(without_gradients, detached, some_after_reading_all, twice),
)


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_a_view(change):
    """It changes the logits, and all views of them that were recorded before."""
    model, tokens, targets = make()

    def use(model):
        logits = model(tokens)[0]
        before = [logits[:, 1:], logits.permute(2, 0, 1), logits.flatten(0, 1), logits.detach(), logits * 2]
        change(logits)
        after = [logits, logits[:, 1:], logits.softmax(-1)]
        loss = F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)
        return loss + sum((each * each.detach().cos()).mean() for each in (*before, *after))

    expected, found, deferral = plain_and_deferred(model, use)
    close(found, expected)
    assert deferral.fused == 0


def test_change_of_a_view_that_is_all_there_is():
    """Nothing else could see the change, so only the view's rows are made."""
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        rows = model(tokens)[0].view(-1, V)[-2:]
        rows /= 0.7
    assert rows.untyped_storage().nbytes() == rows.nbytes


def test_change_of_a_view_of_one_made_before():
    """The logits themselves were never made, so the change cannot reach them, and is not lost."""
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        some = logits[:, 1:]
        some[..., 3].mul_(0.7)
        with pytest.raises(RuntimeError, match="changed in place"):
            logits.logsumexp(-1)


def test_change_refused_of_one_of_several():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        part = model(tokens)[0].split(2, 1)[1]
        with pytest.raises(RuntimeError, match="several views that were made by one call"):
            part[0].mul_(2)


def test_change_of_a_deep_copy():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        copy.deepcopy(logits).zero_()
        assert logits.amax() > 0


def test_change_of_picked_probabilities():
    """The node that made them keeps its result, which a change in place must not reach."""
    model, tokens, targets = make()

    def use(model):
        index = targets.clamp(min=0)[..., None]
        picked = model(tokens)[0].log_softmax(-1).exp().gather(-1, index)
        picked *= torch.linspace(0, 1, picked.numel(), dtype=picked.dtype).view_as(picked)
        return picked.sum()

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected)
