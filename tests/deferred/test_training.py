"""Training loops that nobody rewrote, beside the same loops without the deferral."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.deferred import RealLogitsWarning
from tests.deferred.helpers import V, check, make, norm, plain_and_deferred, within_eager
from tests.ops.chunked_loss.helpers import close
from tests.support.extended import all_extended_but
from tests.support.graphs import needs_tracing


def trained(model, step, deferred, count=5):
    """Losses and final parameters."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    deferral = lowtide.defer_logits(model)
    if not deferred:
        deferral.undo()
    losses = []
    for _ in range(count):
        losses.append(step(model))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if deferred:
        assert deferral.fused >= count
        assert deferral.materialized == {}
    return [torch.stack(losses), *(each.detach() for each in model.parameters())]


def loop(model, step):
    """In float32, as near to a float64 run as the plain model."""
    exact = trained(model, step, deferred=False)
    model = copy.deepcopy(model).float()
    found, plain = (trained(model, step, deferred) for deferred in (True, False))
    for ours, eager, want in zip(found, plain, exact):
        within_eager(ours, eager, want, torch.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_plain_loop(tied):
    model, tokens, targets = make(tied=tied)

    def step(model):
        _, loss = model(tokens, targets)
        loss.backward()
        return loss.detach()

    loop(model, step)


def test_gradients_accumulate():
    model, tokens, targets = make()

    def step(model):
        total = 0.0
        for rows, wanted in zip(tokens, targets):
            logits, _ = model(rows[None])
            loss = (
                F.cross_entropy(logits.view(-1, V), wanted, ignore_index=-1, reduction="sum")
                / targets.numel()
            )
            loss.backward()
            total += loss.detach()
        return total

    loop(model, step)


def test_loss_outside_model_with_accuracy():
    model, tokens, targets = make()
    criterion = nn.CrossEntropyLoss(ignore_index=-1)

    def step(model):
        logits, _ = model(tokens)
        loss = criterion(logits.transpose(1, 2), targets)
        loss.backward()
        assert 0 <= (logits.argmax(-1) == targets).double().mean() <= 1
        return loss.detach()

    loop(model, step)


def test_retained_graph():
    model, tokens, targets = make()

    def gradients():
        loss = model(tokens, targets)[1]
        first = torch.autograd.grad(0.3 * loss, list(model.parameters()), retain_graph=True)
        return [*first, *torch.autograd.grad(-loss, list(model.parameters()))]

    expected = gradients()
    with lowtide.defer_logits(model):
        close(gradients(), expected)


def test_two_losses_of_same_logits():
    model, tokens, targets = make()

    def use(model):
        logits, loss = model(tokens, targets)
        return loss + 0.1 * logits.logsumexp(-1).square().mean() + logits[:, -1].log_softmax(-1)[:, 3].mean()

    with pytest.warns(lowtide.deferred.RealLogitsWarning, match="Tensor.__getitem__"):
        expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.fused == 1
    close(found, expected)


@pytest.mark.parametrize("frozen", ["lm_head", "mlp", "wte"])
def test_frozen(frozen):
    model, tokens, targets = make()
    getattr(model, frozen).requires_grad_(False)
    check(model, lambda model: model(tokens, targets)[1])


def test_frozen_below_head():
    model, tokens, targets = make()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    check(model, lambda model: model(tokens, targets)[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("what", ["body", "model"])
def test_checkpointing(what, reentrant):
    model, tokens, targets = make()

    def use(model):
        x = model.wte(tokens)
        if what == "body":
            x = checkpoint(lambda x: torch.tanh(model.mlp(x)), x, use_reentrant=reentrant)
            return F.cross_entropy(model.lm_head(x).view(-1, V), targets.view(-1), ignore_index=-1)

        def loss(x):
            logits = model.lm_head(torch.tanh(model.mlp(x)))
            return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

        return checkpoint(loss, x, use_reentrant=reentrant)

    def gradients():
        model.zero_grad()
        use(model).backward()
        return [each.grad.clone() for each in model.parameters()]

    expected = gradients()
    with lowtide.defer_logits(model) as deferral:
        close(gradients(), expected)
    assert deferral.fused > 0
    assert deferral.materialized == {}


def test_checkpointing_head():
    model, tokens, targets = make()

    def use(model):
        logits = checkpoint(model.lm_head, torch.tanh(model.mlp(model.wte(tokens))), use_reentrant=False)
        return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

    check(model, use)


@pytest.mark.parametrize("what", ["head", "layer and head"])
def test_checkpointing_head_reentrant(what):
    """Its first pass has no gradients, and must not be taken for a loss without them, beside
    another term neither."""
    model, tokens, targets = make()
    head = model.lm_head if what == "head" else lambda h: model.lm_head(torch.tanh(h))
    with lowtide.defer_logits(model):
        x = torch.tanh(model.mlp(model.wte(tokens)))
        logits = checkpoint(head, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match=r"have left CheckpointFunction, .* use_reentrant=False"):
            F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1) + x.square().mean()
        with pytest.raises(RuntimeError, match=r"have left CheckpointFunction"):
            logits.argmax(-1)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of torch: the inner one
@pytest.mark.parametrize("inner", ["layer and head", "head"])
def test_checkpointing_reentrant_within_another(inner):
    """The inner checkpoint's tensors need no gradient while the outer one's forward runs."""
    model, tokens, _ = make()

    def body(x):
        if inner == "head":
            return checkpoint(model.lm_head, torch.tanh(model.mlp(x)), use_reentrant=True)
        return checkpoint(lambda x: model.lm_head(torch.tanh(model.mlp(x))), x, use_reentrant=True)

    with lowtide.defer_logits(model):
        logits = checkpoint(body, model.wte(tokens), use_reentrant=True)
        for use in (logits.sum, logits.materialize, lambda: F.cross_entropy(logits[0], tokens[0])):
            with pytest.raises(RuntimeError, match=r"have left CheckpointFunction"):
                use()


def test_checkpointing_reentrant_materialized():
    """They are there when the checkpoint ends, but without a gradient."""
    model, tokens, _ = make()
    with lowtide.defer_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        x = torch.tanh(model.mlp(model.wte(tokens)))

        def capped(x):
            logits = model.lm_head(x)
            logits.clamp_(-1, 1)
            return logits

        logits = checkpoint(capped, x, use_reentrant=True)
        for use in (logits.materialize, logits.sum):
            with pytest.raises(RuntimeError, match=r"have left CheckpointFunction"):
                use()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["around the model", "around the model, then float", "around all"])
def test_autocast(where, half):
    """The loss is often formed where autocast is off again; the head's product keeps its dtype."""
    model, tokens, targets = make(dtype=torch.float32)

    def use(model):
        with torch.autocast("cpu", dtype=half):
            logits, loss = model(tokens, targets)
        assert logits.dtype == half
        if where == "around all":
            return loss
        if "float" in where:  # as accelerate does with outputs
            logits = logits.float()
        return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

    expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.materialized == {}
    wide = copy.deepcopy(model).double()
    exact = wide(tokens, targets)[1]
    exact = [exact.detach(), *torch.autograd.grad(exact, list(wide.parameters()))]
    for ours, eager, want in zip(found, expected, exact):
        within_eager(ours, eager, want, half)


def test_float16_with_grad_scaler():
    """Steps that are taken, of gradients that would be 0 in float16 without the scaler."""
    model, tokens, targets = make(dtype=torch.float32)

    def trained(model, deferred, half=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=half)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e4)
        deferral = lowtide.defer_logits(model) if deferred else None
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16, enabled=half):
                loss = model(tokens, targets)[1] * 1e-4
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == (2.0**16 if half else 1.0)
        assert deferral is None or (deferral.fused, deferral.materialized) == (2, {})
        return [each.detach() for each in model.parameters()]

    exact = trained(copy.deepcopy(model).double(), False, half=False)
    eager, found = trained(copy.deepcopy(model), False), trained(copy.deepcopy(model), True)
    for ours, theirs, want, start in zip(found, eager, exact, model.parameters()):
        assert norm(want - start) > 0
        within_eager(*(each.detach() - start.detach() for each in (ours, theirs, want)), torch.float16)


def test_autocast_disabled_inside():
    model, tokens, _ = make(dtype=torch.float32)
    with lowtide.defer_logits(model), torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.tanh(model.mlp(model.wte(tokens)))
        with torch.autocast("cpu", enabled=False):
            logits = model.lm_head(hidden.float())
        assert logits.dtype == torch.float32
        exact = hidden.float().double() @ model.lm_head.weight.double().t()
        found = logits.logsumexp(-1)
    within_eager(found, exact.float().logsumexp(-1), exact.logsumexp(-1), torch.float32, size=norm(exact))


def test_no_grad_in_training_mode():
    model, tokens, targets = make()
    with torch.no_grad():
        expected = model(tokens, targets)[1]
        with lowtide.defer_logits(model) as deferral:
            logits, loss = model(tokens, targets)
    assert not loss.requires_grad
    assert not logits.requires_grad
    assert not F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1).requires_grad
    assert deferral.materialized == {}
    close([loss], [expected])


def test_inference_mode_in_training_mode():
    model, tokens, targets = make()
    with torch.inference_mode(), lowtide.defer_logits(model):
        logits, loss = model(tokens, targets)
        assert loss.isfinite()
        assert logits.argmax(-1).shape == tokens.shape
        with pytest.warns(lowtide.deferred.RealLogitsWarning, match="sin"):
            assert logits.sin().isfinite().all()


def test_torch_func():
    model, tokens, targets = make()
    parameters = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (tokens, targets))[1]

    expected = torch.func.grad(loss)(parameters)
    with lowtide.defer_logits(model):
        found = torch.func.grad(loss)(parameters)
    close(list(found.values()), list(expected.values()))


@needs_tracing
@pytest.mark.parametrize(
    "backend", all_extended_but(["eager", "aot_eager"], ["eager", "aot_eager", "inductor"])
)
def test_compile_one_graph(backend):
    model, tokens, targets = make(tied=True)
    loss = model(tokens, targets)[1]
    expected = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    torch._dynamo.reset()
    with lowtide.defer_logits(model):
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        logits, loss = compiled(tokens, targets)
        close([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], expected)
        assert type(logits).__name__ == "DeferredLogits"
        logits = compiled(tokens)[0]
        outside = F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)
        close([outside.detach(), *torch.autograd.grad(outside, list(model.parameters()))], expected)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="its guards do not look at a submodule's class")
@needs_tracing
def test_compile_before_deferral():
    model, tokens, _ = make()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert isinstance(compiled(tokens)[0], torch.Tensor)
    with lowtide.defer_logits(model):
        assert type(compiled(tokens)[0]).__name__ == "DeferredLogits"
    assert isinstance(compiled(tokens)[0], torch.Tensor)


def sigmoid(logits, targets):
    return logits.sigmoid().mean()


def in_place(logits, targets):
    logits = logits * 2
    logits[..., 0] = 0.0
    return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)


GRAPH = {
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y, ignore_index=-1),
    "soft cap, shifted": lambda z, y: F.cross_entropy(
        (5 * torch.tanh(z / 5))[:, :-1].reshape(-1, V), y[:, 1:].flatten(), ignore_index=-1
    ),
    "log-probabilities": lambda z, y: z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None]).mean(),
    "logsumexp": lambda z, y: z.logsumexp(-1).square().mean(),
}
REAL = {"real logits": sigmoid, "a change in place": in_place}
BREAKS = {
    "CrossEntropyLoss": lambda z, y: nn.CrossEntropyLoss(ignore_index=-1)(z.view(-1, V), y.view(-1)),
    "argmax": lambda z, y: z.logsumexp(-1).mean() + z.argmax(-1).double().mean(),
    "entropy": lambda z, y: (z.log_softmax(-1).exp() * z.log_softmax(-1)).sum(-1).mean(),
}


@needs_tracing
# torch.compile's own, where a graph breaks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "name",
    all_extended_but(["classes second", "logsumexp", *REAL, "CrossEntropyLoss"], [*GRAPH, *REAL, *BREAKS]),
)
def test_compile(name):
    """In one graph, or right nevertheless."""
    use = (GRAPH | REAL | BREAKS)[name]
    model, tokens, targets = make()
    loss = use(model(tokens)[0], targets)
    expected = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    torch._dynamo.reset()
    with lowtide.defer_logits(model):
        compiled = torch.compile(
            lambda: use(model(tokens)[0], targets), fullgraph=name not in BREAKS, backend="eager"
        )
        warns = pytest.warns(lowtide.deferred.RealLogitsWarning) if name in REAL else contextlib.nullcontext()
        with warns:
            loss = compiled()
        close([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], expected)
