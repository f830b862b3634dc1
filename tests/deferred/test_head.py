"""The swap itself: what of the model it leaves alone, and calls that it cannot defer."""

import copy
import pickle

import pytest
import torch
from torch import nn

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.proxies.logits import DeferredLogits
from tests.deferred.helpers import GPT, D, V, make


def test_deferred_only_in_training():
    model, tokens, _ = make()
    expected = model(tokens)[0]
    with lowtide.defer_logits(model):
        assert isinstance(model(tokens)[0], DeferredLogits)
        model.eval()
        assert torch.equal(model(tokens)[0], expected)
        model.train()
        assert isinstance(model(tokens)[0], DeferredLogits)


def test_undo():
    model, tokens, _ = make()
    deferral = lowtide.defer_logits(model)
    assert deferral.head is model.lm_head
    deferral.undo()
    deferral.undo()
    assert type(model.lm_head) is nn.Linear
    assert isinstance(model(tokens)[0], torch.Tensor)
    lowtide.defer_logits(model).undo()


def test_undo_under_foreign_class():
    """fully_shard makes a class of the module's."""
    model, tokens, _ = make()
    deferral = lowtide.defer_logits(model)
    model.lm_head.__class__ = type("Sharded", (type(model.lm_head),), {})
    assert isinstance(model(tokens)[0], DeferredLogits)
    deferral.undo()
    assert isinstance(model(tokens)[0], torch.Tensor)
    lowtide.defer_logits(model).undo()


def test_model_looks_unchanged():
    model, _, _ = make(tied=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    text = repr(model)
    lowtide.defer_logits(model)
    assert isinstance(model.lm_head, nn.Linear)
    assert model.lm_head.weight is model.wte.weight
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert repr(model) == text.replace("(lm_head): Linear", "(lm_head): DeferredLinear")
    model.load_state_dict(before)


@pytest.mark.parametrize("how", ["copy", "pickle", "old pickle", "save"])
def test_copy_is_plain_model(how, tmp_path):
    model, tokens, _ = make(tied=True)
    expected = model(tokens)[0]
    lowtide.defer_logits(model)
    if how == "copy":
        copied = copy.deepcopy(model)
    elif how == "save":
        torch.save(model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        copied = pickle.loads(pickle.dumps(model, protocol=1 if how == "old pickle" else None))
    assert type(copied.lm_head) is nn.Linear
    assert copied.lm_head.weight is copied.wte.weight
    assert copied.lm_head.weight is not model.lm_head.weight
    assert torch.equal(copied(tokens)[0], expected)
    assert isinstance(model(tokens)[0], DeferredLogits)


def test_pickle_loads_without_lowtide():
    model, _, _ = make()
    lowtide.defer_logits(model)
    assert b"lowtide" not in pickle.dumps(model.lm_head)


def test_forward_hooks():
    model, tokens, targets = make()
    seen = []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with lowtide.defer_logits(model) as deferral:
        model(tokens, targets)
    assert seen == [(*tokens.shape, D), (*tokens.shape, V)]
    assert (deferral.fused, deferral.materialized) == (1, {})


def test_backward_hook_of_head():
    model, tokens, targets = make()
    seen = []
    model.lm_head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    model(tokens, targets)[1].backward()
    with lowtide.defer_logits(model), pytest.warns(RealLogitsWarning, match="a backward hook of the head"):
        model(tokens, targets)[1].backward()
    assert torch.equal(*seen)


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing"
)  # torch warns of the hook on the embedding, whose inputs are integers
def test_backward_hook_of_all_modules():
    model, tokens, targets = make()
    seen = []

    def hook(module, inputs, outputs):
        if module is model.lm_head:
            seen.append(outputs[0])

    with nn.modules.module.register_module_full_backward_hook(hook):
        model(tokens, targets)[1].backward()
        with lowtide.defer_logits(model), pytest.warns(RealLogitsWarning, match="a backward hook of the"):
            model(tokens, targets)[1].backward()
    assert torch.equal(*seen)


def test_head_called_by_name():
    model, tokens, _ = make()
    hidden = torch.randn(*tokens.shape, D, dtype=model.lm_head.weight.dtype, requires_grad=True)
    with lowtide.defer_logits(model) as deferral:
        model.lm_head(input=hidden).logsumexp(-1).sum().backward()
    found = hidden.grad.clone()
    (expected,) = torch.autograd.grad(model.lm_head(hidden).logsumexp(-1).sum(), hidden)
    torch.testing.assert_close(found, expected)
    assert deferral.materialized == {}


def test_backward_hook_of_weight():
    model, tokens, targets = make(tied=True)
    seen = []
    model.lm_head.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    for deferred in (False, True):
        deferral = lowtide.defer_logits(model)
        if not deferred:
            deferral.undo()
        model.zero_grad()
        model(tokens, targets)[1].backward()
    assert len(seen) == 4
    for ours, theirs in zip(seen[2:], seen[:2]):
        torch.testing.assert_close(ours, theirs)


# A call that isn't deferred.


@pytest.mark.parametrize("why", ["dtype", "features"])
def test_product_refused_by_torch(why):
    model, _, _ = make(dtype=torch.float32)
    x = torch.randn(2, D, dtype=torch.float64) if why == "dtype" else torch.randn(2, D + 1)
    with lowtide.defer_logits(model), pytest.raises(RuntimeError, match=r"dtype|shapes"):
        model.lm_head(x)


def test_head_without_product():
    class Other(nn.Linear):
        def forward(self, x):
            return x.sin()

    model, tokens, _ = make()
    model.lm_head = Other(D, V).double()
    expected = model(tokens)[0]
    with lowtide.defer_logits(model):
        assert torch.equal(model(tokens)[0], expected)


@pytest.mark.parametrize("model", [GPT, torch.zeros(2), None])
def test_model_not_module(model):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
        lowtide.defer_logits(model)


def test_head_of_other_model():
    model, other = GPT(), GPT()
    with pytest.raises(ValueError, match="head must be a module of the model"):
        lowtide.defer_logits(model, head=other.lm_head)
    assert type(other.lm_head) is nn.Linear
    with lowtide.defer_logits(model, head=model.lm_head) as deferral:
        assert repr(deferral) == "Deferral(head=Linear, fused=0, materialized={})"
