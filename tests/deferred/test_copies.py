"""A change of a copy of deferred logits changes no other logits, and is no error there."""

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


@pytest.mark.parametrize("copy", COPIES)
def test_change_of_a_copy(copy):
    """The copy is changed in place, as for sampling, and the loss is of the logits as they were."""
    model, tokens, targets = make()

    def use(model):
        logits = model(tokens)[0]
        copied = COPIES[copy](logits)
        copied[..., 3] = -100
        loss = F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)
        return loss + copied.double().square().mean()

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected)


def test_change_of_the_logits_themselves():
    """Results computed before the change keep their values; a view changes with the logits."""
    model, tokens, _ = make()

    def use(model):
        logits = model(tokens)[0]
        doubled = logits * 2
        logits.mul_(3)
        return doubled.sum() + logits.square().sum()

    expected, found, _ = plain_and_deferred(model, use)
    close(found, expected)
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        view, doubled = logits[..., :5], logits * 2
        logits.mul_(3)
        assert doubled.shape == logits.shape
        with pytest.raises(RuntimeError, match=r"changed in place \(Tensor.mul_\), and views of them"):
            view.sum()
