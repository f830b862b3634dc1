import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, spectral_norm

import lowtide


def batch(device, dtype=torch.float32):
    return torch.randn(2, 5, 8).to(device, dtype), torch.randint(21, (2, 5), device=device)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_module_matches_function(device, dtype, bias):
    class_weight = torch.rand(21, device=device)
    options = {"reduction": "sum", "ignore_index": 3, "label_smoothing": 0.1, "workspace": 1 << 20}
    criterion = lowtide.LinearCrossEntropyLoss(
        8, 21, bias=bias, weight=class_weight, device=device, dtype=dtype, **options
    )
    assert type(criterion.linear) is nn.Linear
    assert criterion.linear.weight.shape == (21, 8)
    assert criterion.linear.weight.dtype == dtype
    assert (criterion.linear.bias is not None) == bias
    hidden, target = batch(device, dtype)
    expected = lowtide.linear_cross_entropy(
        hidden,
        criterion.linear.weight,
        target,
        linear_bias=criterion.linear.bias,
        weight=class_weight,
        **options,
    )
    loss = criterion(hidden, target)
    assert torch.equal(loss, expected)
    parameters = list(criterion.parameters())
    for ours, theirs in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)):
        assert torch.equal(ours, theirs)


def test_module_initialised_as_linear():
    torch.manual_seed(5)
    criterion = lowtide.LinearCrossEntropyLoss(8, 21, bias=True)
    torch.manual_seed(5)
    linear = nn.Linear(8, 21)
    assert torch.equal(criterion.linear.weight, linear.weight)
    assert torch.equal(criterion.linear.bias, linear.bias)


def saved(criterion):
    buffer = io.BytesIO()
    torch.save(criterion.state_dict(), buffer)
    buffer.seek(0)
    fresh = lowtide.LinearCrossEntropyLoss(8, 21, bias=True, weight=torch.ones(21), label_smoothing=0.1)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return fresh


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "state_dict": saved,
}


@pytest.mark.parametrize("way", COPIES)
def test_module_copies(way):
    criterion = lowtide.LinearCrossEntropyLoss(8, 21, bias=True, weight=torch.rand(21), label_smoothing=0.1)
    other = COPIES[way](criterion)
    assert torch.equal(criterion(*(data := batch("cpu"))), other(*data))
    assert other.linear.weight.data_ptr() != criterion.linear.weight.data_ptr()


def test_module_state_dict_names():
    plain = lowtide.LinearCrossEntropyLoss(8, 21)
    assert list(plain.state_dict()) == ["linear.weight"]
    full = lowtide.LinearCrossEntropyLoss(8, 21, bias=True, weight=torch.ones(21))
    assert sorted(full.state_dict()) == ["linear.bias", "linear.weight", "weight"]
    assert [name for name, _ in full.named_parameters()] == ["linear.weight", "linear.bias"]


def test_module_moves_and_casts():
    criterion = lowtide.LinearCrossEntropyLoss(8, 21, weight=torch.rand(21)).to(torch.bfloat16)
    assert criterion.weight.dtype == criterion.linear.weight.dtype == torch.bfloat16
    meta = lowtide.LinearCrossEntropyLoss(8, 21, device="meta")
    assert meta.linear.weight.is_meta


def test_tied_head(device):
    embedding = nn.Embedding(21, 8, device=device)
    criterion = lowtide.LinearCrossEntropyLoss(8, 21, device=device)
    criterion.linear.weight = embedding.weight
    tokens, target = torch.randint(21, (2, 5), device=device), torch.randint(21, (2, 5), device=device)
    criterion(embedding(tokens), target).backward()
    reference = embedding.weight.detach().clone().requires_grad_()
    logits = nn.functional.embedding(tokens, reference) @ reference.t()
    nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
    torch.testing.assert_close(embedding.weight.grad, reference.grad, rtol=1e-5, atol=1e-6)


def test_module_repr():
    text = repr(lowtide.LinearCrossEntropyLoss(8, 21, label_smoothing=0.1))
    assert "in_features=8, out_features=21, bias=False" in text
    assert "reduction='mean', label_smoothing=0.1, z_loss=0.0, backend='auto'" in text
    assert "workspace" not in text


def test_module_bad_options_raise_in_call():
    with pytest.raises(ValueError, match="reduction must be one of"):
        lowtide.LinearCrossEntropyLoss(8, 21, reduction="avg")(*batch("cpu"))


@pytest.mark.parametrize("out_features", [(), (2,)])
def test_module_errors_name_arguments(out_features):
    criterion = lowtide.LinearCrossEntropyLoss(8, 5, out_features=out_features)
    with pytest.raises(ValueError, match=r"input must have shape \[\.\.\., 8\], in_features .*got \[3, 7\]"):
        criterion(torch.zeros(3, 7), torch.zeros(3, dtype=torch.long))
    for shape in ((3, *out_features), (4,), (3, 5, 6)):
        with pytest.raises(TypeError, match=r"target must hold class indices.*got torch\.int16"):
            criterion(torch.zeros(3, 8), torch.zeros(shape, dtype=torch.int16))


class Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 0.5


def replace(criterion, linear):
    criterion.linear = linear


ADDITIONS = {
    "a hook": (lambda criterion: criterion.linear.register_forward_hook(lambda *_: None), "<lambda>"),
    "a gradient's hook": (
        lambda criterion: criterion.linear.register_full_backward_hook(lambda *_: None),
        "one with a hook",
    ),
    "a weight computed in a hook": (lambda criterion: spectral_norm(criterion.linear), "hook, SpectralNorm"),
    "a subclass": (lambda criterion: replace(criterion, Scaled(8, 21)), r"a .*test_module\.Scaled"),
    "another forward": (
        lambda criterion: setattr(criterion.linear, "forward", lambda input: input),
        "one whose forward is replaced",
    ),
    "another module": (
        lambda criterion: replace(criterion, nn.Sequential(nn.LayerNorm(8), criterion.linear)),
        "a torch.nn.modules.container.Sequential",
    ),
}


@pytest.mark.parametrize("kind", ADDITIONS)
def test_what_the_layer_adds_is_an_error(kind):
    criterion = lowtide.LinearCrossEntropyLoss(8, 21)
    add, found = ADDITIONS[kind]
    add(criterion)
    with pytest.raises(ValueError, match=rf"\.linear must be an nn\.Linear, .*{found}.*defer_logits"):
        criterion(*batch("cpu"))


@pytest.mark.parametrize("options", [{}, {"use_dora": True}])
def test_adapters_of_the_layer_are_an_error(options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", r=2, **options)
    model = peft.get_peft_model(nn.Sequential(lowtide.LinearCrossEntropyLoss(8, 21)), config)
    with pytest.raises(ValueError, match=r"got a peft\..*Linear, .*modules_to_save trains it whole"):
        model.base_model.model[0](*batch("cpu"))


def saved_by_peft(criterion):
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(8, 8), criterion)
    config = peft.LoraConfig(target_modules=["0"], modules_to_save=["linear"], r=2)
    assert peft.get_peft_model(model, config)
    return criterion.linear


def removed_hook(criterion):
    criterion.linear.register_forward_hook(lambda *_: None).remove()
    criterion.linear.forward = criterion.linear.forward  # as accelerate leaves it


def deferred(criterion):
    lowtide.defer_logits(criterion, head=criterion.linear)


PRODUCTS = {
    "weight_norm": lambda criterion: parametrizations.weight_norm(criterion.linear),
    "modules_to_save": saved_by_peft,
    "compiled": lambda criterion: replace(criterion, torch.compile(criterion.linear, backend="eager")),
    "checkpointed": lambda criterion: replace(criterion, checkpoint_wrapper(criterion.linear)),
    "removed": removed_hook,
    "deferred": deferred,
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_layer_that_is_the_product(kind):
    criterion = lowtide.LinearCrossEntropyLoss(8, 21, bias=True, dtype=torch.float64)
    PRODUCTS[kind](criterion)
    hidden, target = batch("cpu", torch.float64)
    loss = criterion(hidden, target)
    logits = nn.functional.linear(hidden, criterion.linear.weight, criterion.linear.bias)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()))
    loss.backward()
    trained = [each for each in criterion.parameters() if each.grad is not None]
    assert len(trained) == (3 if kind == "weight_norm" else 2)
    torch._dynamo.reset()
    if kind != "checkpointed":  # the wrapper keeps torch.compile out
        compiled = torch.compile(criterion, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(hidden, target), loss)
