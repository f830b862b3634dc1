"""Which module is the head: found, named, shared, or refused with what to do."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.deferred import RealLogitsWarning
from tests.deferred.helpers import D, V, make, plain_and_deferred
from tests.ops.chunked_loss.helpers import close


class Transformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.cls = nn.Linear(4, 4), nn.Linear(4, 9)

    def get_output_embeddings(self):
        return self.cls


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Linear(4, 4), nn.Linear(4, 1000)

    def forward(self, x):
        return self.out(self.body(x))


def test_head_from_model():
    model = Transformed()
    with lowtide.defer_logits(model) as deferral:
        assert deferral.head is model.cls


@pytest.mark.parametrize("wrap", [lambda model: torch.compile(model, backend="eager"), nn.DataParallel])
def test_head_in_wrapper(wrap):
    model = Transformed()
    with lowtide.defer_logits(wrap(model)) as deferral:
        assert deferral.head is model.cls


def test_head_on_several_devices():
    wrapped = nn.DataParallel(Transformed())
    wrapped.device_ids = [0, 1]  # as with two GPUs
    with pytest.raises(ValueError, match="use DistributedDataParallel, one process a device"):
        lowtide.defer_logits(wrapped)


def test_head_named_for_classifier():
    model = Classifier()
    x, target = torch.randn(5, 4), torch.arange(5)
    expected = F.cross_entropy(model(x), target)
    with lowtide.defer_logits(model, head=model.out) as deferral:
        torch.testing.assert_close(F.cross_entropy(model(x), target), expected)
        assert deferral.fused == 1


def test_head_missing():
    with pytest.raises(
        ValueError, match=r"Classifier has no linear head .* no nn.Linear has as many outputs"
    ):
        lowtide.defer_logits(Classifier())


def test_head_ambiguous():
    model, _, _ = make()
    model.second = nn.Linear(D, V)
    with pytest.raises(ValueError, match=r"lm_head, second all have as many outputs .* pass head="):
        lowtide.defer_logits(model)


def test_head_with_one_output():
    model, _, _ = make()
    model.score = nn.Linear(D, 1)
    with pytest.raises(ValueError, match=r"this Linear has one output .* pass head="):
        lowtide.defer_logits(model, head=model.score)


def test_head_without_product():
    model, _, _ = make()
    model.activation = nn.ReLU()
    for head in (model.activation, model.wte):
        with pytest.raises(ValueError, match=r"is no linear head: pass head="):
            lowtide.defer_logits(model, head=head)
    model.heads = nn.ModuleList([nn.Linear(4, 4)])
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        lowtide.defer_logits(model, head=model.heads)
    with pytest.raises(TypeError, match=r"as model\.lm_head, got Parameter"):
        lowtide.defer_logits(model, head=model.lm_head.weight)


def test_head_deferred_already():
    model, _, _ = make()
    with lowtide.defer_logits(model), pytest.raises(ValueError, match="deferred already; undo"):
        lowtide.defer_logits(model)


def test_head_with_own_forward():
    model, _, _ = make()
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: own(x)
    with pytest.raises(ValueError, match=r"replaced the forward of this Linear alone"):
        lowtide.defer_logits(model)


def partition(parameter):
    """As DeepSpeed ZeRO-3 leaves a parameter outside of its module's forward: an imitation of its
    attributes, since DeepSpeed itself is no dependency of the tests."""
    parameter.ds_id, parameter.ds_shape = 0, parameter.shape
    parameter.ds_status = "ZeroParamStatus.NOT_AVAILABLE"
    parameter.ds_tensor = parameter.data.flatten()
    parameter.data = torch.empty(0, dtype=parameter.dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_weight_partitioned_by_zero(tied):
    model, _, _ = make(tied=tied)
    partition(model.lm_head.weight)
    for head in (None, model.lm_head):
        with pytest.raises(ValueError, match=r"ZeRO-3 has partitioned the head's weight") as caught:
            lowtide.defer_logits(model, head=head)
        for advice in ("Use ZeRO-1 or -2 or FSDP2", "linear_cross_entropy", "GatheredParameters"):
            assert advice in str(caught.value)
    assert type(model.lm_head) is nn.Linear


def test_weight_partitioned_by_zero_later():
    """It is there in the head's forward alone: real logits, by name."""
    model, tokens, targets = make()
    expected = model(tokens, targets)[1]
    deferral = lowtide.defer_logits(model)
    weight = model.lm_head.weight
    partition(weight)
    gathered, freed = (
        lambda *_: setattr(weight, "data", weight.ds_tensor.view(weight.ds_shape)),
        lambda *_: setattr(weight, "data", torch.empty(0, dtype=weight.dtype)),
    )
    model.lm_head.register_forward_pre_hook(gathered)
    model.lm_head.register_forward_hook(freed)
    with pytest.warns(RealLogitsWarning, match="a weight that DeepSpeed ZeRO-3 partitions needs real logits"):
        loss = model(tokens, targets)[1]
    assert torch.equal(loss, expected)
    assert deferral.fused == 0


def test_head_shared_within_model():
    """A second use that needs real logits has them, to the bit, and is named; the loss is fused."""
    model, tokens, targets = make()

    def use(model):
        _, loss = model(tokens, targets)
        return loss + torch.sigmoid(model.lm_head(model.wte(tokens))).square().mean()

    with pytest.warns(
        RealLogitsWarning, match=r"torch\.sigmoid needs real logits.*call the head in eval mode"
    ):
        expected, found, deferral = plain_and_deferred(model, use)
    assert (deferral.fused, deferral.materialized) == (1, {"torch.sigmoid": 1})
    close(found, expected)

    def as_advised(model):
        _, loss = model(tokens, targets)
        model.lm_head.eval()
        other = model.lm_head(model.wte(tokens))
        model.lm_head.train()
        return loss + torch.sigmoid(other).square().mean()

    _, found, deferral = plain_and_deferred(model, as_advised)
    assert (deferral.fused, deferral.materialized) == (1, {})
    close(found, expected)


def test_head_shared_by_two_models():
    model, _, _ = make()
    other, tokens, targets = make()
    other.lm_head = model.lm_head
    expected = other(tokens, targets)[1]
    with lowtide.defer_logits(model) as deferral:
        with pytest.raises(ValueError, match="deferred already; undo"):
            lowtide.defer_logits(other)
        close([other(tokens, targets)[1]], [expected])
    assert deferral.fused == 1


def test_weight_freed_after_head():
    """As FSDP2 does with a unit resharded after its forward (itself in test_distributed.py)."""
    model, tokens, targets = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        model.lm_head.weight.untyped_storage().resize_(0)
        for use in (lambda: F.cross_entropy(logits.view(-1, V), targets.view(-1)), lambda: logits.sin()):
            with pytest.raises(RuntimeError, match=r"weight has been freed .* reshard_after_forward=False"):
                use()


def test_torch_not_patched():
    names = (torch, nn.functional, nn.Linear, torch.Tensor, nn.CrossEntropyLoss)
    before = [dict(vars(each)) for each in names]
    model, tokens, targets = make()
    lowtide.defer_logits(model)
    model(tokens, targets)[1].backward()
    assert [dict(vars(each)) for each in names] == before
