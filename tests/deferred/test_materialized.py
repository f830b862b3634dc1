"""Whatever else is asked for makes real logits: to the bit those of the model, announced once.

Of some rows or classes only these are made, and a smaller product may round in another way."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.recorded.logits import DeferredLogits
from lowtide.deferred.reductions import log_probs
from tests.deferred.helpers import B, T, V, make, plain_and_deferred
from tests.ops.chunked_loss.helpers import close

# Operations that materialise the logits, and their names in the warning.
OPERATIONS = {
    "sort": (lambda z: z.sort(-1).values, r"torch\.sort"),
    "function": (lambda z: torch.sigmoid(z), r"torch\.sigmoid"),
    "functional": (lambda z: F.gelu(z), r"torch\.nn\.functional\.gelu"),
    "operator": (lambda z: z + torch.ones(B, T, V, dtype=z.dtype), r"Tensor\.__add__"),
    "reflected": (lambda z: 1 - z, r"Tensor\.__rsub__"),
    "on the right": (lambda z: torch.ones(B, T, 1, dtype=z.dtype) * z, "mul"),
    "comparison": (lambda z: torch.where(z > 0, z, -z), r"Tensor\.__gt__"),
    "of all": (lambda z: z.sum(), r"torch\.sum"),
    "over rows": (lambda z: z.softmax(1), r"torch\.softmax"),
    "largest of all": (lambda z: z.max(), r"torch\.max"),
    "a class": (lambda z: z[..., 3], r"Tensor\.__getitem__"),
    "a new dimension": (lambda z: z[None], r"Tensor\.__getitem__"),
    "mixing view": (lambda z: z.view(-1), r"Tensor\.view|torch\.view"),
    "stack": (lambda z: torch.stack([z, z]), r"torch\.stack"),
    "einsum": (lambda z: torch.einsum("btv,btv->bt", z, z), r"torch\.einsum"),
    "after scale and cap": (lambda z: (7 * torch.tanh(z.float() / 7)).sigmoid(), r"torch\.sigmoid"),
    "a loss of some rows": (
        lambda z: F.cross_entropy(z.float().cumsum(1).view(-1, V), torch.arange(B * T)),
        "cumsum",
    ),
    "another loss": (lambda z: F.mse_loss(z, torch.zeros(B, T, V, dtype=z.dtype)), "mse_loss"),
    "transposed": (lambda z: z.view(-1, V).T.sin(), r"torch\.sin"),
}
PARTS = {
    "after a shift": lambda z: z[:, 1:].transpose(1, 2).sigmoid(),
    "a sequence": lambda z: z[0].T.sin(),
    "some classes": lambda z: z[..., 3:9].sin(),
    "by indices": lambda z: z[torch.tensor([0, 0, 2]), 1:].sin(),
    "a product of its own each": lambda z: z.tanh().tanh().logsumexp(-1) + z.tanh().tanh().sin().sum(-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_materialized_exact_with_one_warning(name, dtype):
    use, operation = OPERATIONS[name]
    model, tokens, _ = make(bias=True, dtype=dtype)
    expected = use(model(tokens)[0])
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    with lowtide.defer_logits(model) as deferral:
        with pytest.warns(RealLogitsWarning, match=f"{operation} needs real logits") as caught:
            found = use(model(tokens)[0])
        assert {warning.filename for warning in caught} == {__file__}
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            again = use(model(tokens)[0])
    assert sum(deferral.materialized.values()) == 2 * len(caught)
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)
    for ours, theirs in zip(torch.autograd.grad(found.sum(), list(model.parameters())), gradients):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize("name", PARTS)
def test_materialized_slices(name):
    model, tokens, _ = make(bias=True)
    expected, found, deferral = plain_and_deferred(model, lambda model: PARTS[name](model(tokens)[0]))
    assert sum(deferral.materialized.values()) == 1
    close(found, expected, torch.float32)


@pytest.fixture
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        yield


@pytest.mark.usefixtures("_quiet")
class TestRealLogits:
    def test_made_once(self):
        model, tokens, targets = make()
        with lowtide.defer_logits(model) as deferral:
            logits = model(tokens)[0]
            one, other = logits.sin(), logits.cos()
            torch.testing.assert_close(one.square() + other.square(), torch.ones_like(one))
            F.cross_entropy(logits.view(-1, V), targets.clamp(min=0).view(-1))
        assert deferral.materialized == {"torch.sin": 1}
        assert deferral.fused == 0, "they are there already"

    def test_graph_kept(self):
        """Made under no_grad they still belong to the graph that they were recorded in."""
        model, tokens, targets = make()

        def use(model):
            logits = model(tokens)[0]
            with torch.no_grad():
                logits.sin()
            return F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)

        expected, found, _ = plain_and_deferred(model, use)
        close(found, expected, torch.float32)

    def test_change_in_place(self):
        """A mask over some classes, as Chameleon has it."""
        model, tokens, targets = make()

        def use(model):
            logits = model(tokens)[0].float()
            logits[:, :, 40:] = -30.0
            logits *= 2
            logits.div_(3)
            return F.cross_entropy(logits.view(-1, V), targets.view(-1) % 40, ignore_index=-1)

        expected, found, _ = plain_and_deferred(model, use)
        close(found, expected, torch.float32)

    def test_clone_is_real(self):
        """What is changed is not what exp() needs for its gradient."""
        model, tokens, _ = make()
        expected, found, _ = plain_and_deferred(
            model, lambda model: (model(tokens)[0] * 0.1).exp().clone().mul_(0.5).sum()
        )
        close(found, expected, torch.float32)

    def test_views_share_memory(self):
        model, tokens, _ = make()
        with lowtide.defer_logits(model):
            logits = model(tokens)[0]
            logits.sin()
            logits.view(-1, V)[0] = 5.0
            assert (logits[0, 0] == 5).all()

    def test_other_logits_refused_after_change(self):
        model, tokens, targets = make()
        with lowtide.defer_logits(model):
            logits = model(tokens)[0]
            flat = logits.view(-1, V)
            logits[..., 0] = 0.0
            with pytest.raises(RuntimeError, match=r"changed in place \(Tensor.__setitem__\)"):
                F.cross_entropy(flat, targets.view(-1))

    @pytest.mark.parametrize("operator", ["+=", "-=", "*=", "/=", "//=", "%=", "**="])
    def test_in_place_operators_seen(self, operator):
        model, tokens, _ = make()
        with lowtide.defer_logits(model), torch.no_grad():
            logits = model(tokens)[0]
            names = {"z": logits, "u": logits.detach()}
            exec(f"z {operator} 2", names)
            with pytest.raises(RuntimeError, match="changed in place"):
                names["u"].sum()

    def test_change_refused_after_others_made(self):
        model, tokens, _ = make()
        with lowtide.defer_logits(model):
            logits = model(tokens)[0]
            logits.view(-1, V).sin()
            with pytest.raises(RuntimeError, match="other forms have been made already"):
                logits.mul_(2)

    def test_copy_and_pickle(self):
        model, tokens, _ = make(dtype=torch.float32)
        expected = model(tokens)[0]
        with lowtide.defer_logits(model):
            logits = model(tokens)[0]
            copied = copy.deepcopy(logits)
            assert isinstance(copied, DeferredLogits)
            assert not copied.requires_grad
            assert torch.equal(pickle.loads(pickle.dumps(copied)), expected)
            assert (copied.detach().numpy() == expected.detach().numpy()).all()

    def test_out_argument(self):
        model, tokens, _ = make()
        with lowtide.defer_logits(model), torch.no_grad():
            logits = model(tokens)[0]
            torch.mul(torch.ones(B, T, V, dtype=torch.float64), 3.0, out=logits)
            assert (logits == 3).all()


@pytest.mark.parametrize("name", ["retain_grad", "register_hook", "grad"])
def test_gradient_of_logits_refused(name):
    model, tokens, _ = make()
    with (
        lowtide.defer_logits(model),
        pytest.raises(RuntimeError, match=r"the loss does not go through these"),
    ):
        getattr(model(tokens)[0], name)


def test_gradient_wrt_logits_refused():
    model, tokens, targets = make()
    with lowtide.defer_logits(model):
        logits, loss = model(tokens, targets)
        with pytest.raises(RuntimeError, match=r"torch.autograd.grad: the loss does not go through these"):
            torch.autograd.grad(loss, logits, allow_unused=True)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
def test_gradient_from_logits():
    model, tokens, _ = make()
    expected = torch.autograd.grad(model(tokens)[0], model.wte.weight, torch.ones(B, T, V).double())
    with lowtide.defer_logits(model):
        found = torch.autograd.grad(model(tokens)[0], model.wte.weight, torch.ones(B, T, V).double())
    close(found, expected, torch.float32)


def test_weight_changed_refused():
    model, tokens, targets = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.defer_logits(model):
        logits, loss = model(tokens, targets)
        loss.backward()
        best = logits.argmax(-1)
        optimizer.step()
        assert best.shape == (B, T)
        with pytest.raises(
            RuntimeError, match=r"changed in place since the head was called \(by optimizer.step"
        ):
            logits.argmax(-1)


def test_attribute_unknown():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        assert not hasattr(logits, "loss")
        with pytest.raises(AttributeError, match="not an attribute of a tensor"):
            logits.loss  # noqa: B018


class OwnLoss(torch.autograd.Function):
    """The sum of squares; of a product that it makes on the way."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return (logits * logits).sum(-1).sum()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return 2 * gradient * logits


@pytest.mark.parametrize("derived", [False, True])
def test_autograd_function_refused(derived):
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        with pytest.raises(RuntimeError, match=r"OwnLoss, an autograd.Function, was given deferred logits"):
            OwnLoss.apply(logits[:, 1:] * 2 if derived else logits)


def test_autograd_function_without_context():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(logits):
            return logits.sum(-1)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    model, tokens, _ = make()
    with lowtide.defer_logits(model), torch.no_grad():
        assert (
            Own.apply(model(tokens)[0]).shape == tokens.shape
        )  # nothing is lost where nothing is differentiated
    with (
        lowtide.defer_logits(model),
        pytest.raises(RuntimeError, match=r"^an autograd.Function, was given deferred logits"),
    ):
        Own.apply(model(tokens)[0])


def test_autograd_function_takes_materialized():
    model, tokens, _ = make()

    def use(model):
        logits = model(tokens)[0]
        return OwnLoss.apply(logits if isinstance(logits, torch.Tensor) else logits.materialize())

    with pytest.warns(RealLogitsWarning, match="materialize needs real logits"):
        expected, found, _ = plain_and_deferred(model, use)
    close(found, expected, torch.float32)


def test_autograd_function_with_metric():
    """Logits that a function makes itself are not lost in it."""

    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tokens, run):
            with torch.enable_grad():
                logits = run(tokens)
            with torch.no_grad():
                return logits.argmax(-1)

    model, tokens, _ = make()
    expected = model(tokens)[0].argmax(-1)
    with lowtide.defer_logits(model):
        assert torch.equal(Whole.apply(tokens, lambda tokens: model(tokens)[0]), expected)


def test_entropy_with_impossible_class():
    logits = torch.tensor([[0.3, -torch.inf, 1.0]], requires_grad=True)
    possible = logits.detach()[:, [0, 2]].requires_grad_()
    found = log_probs(logits, torch.tensor([2])).entropy
    expected = torch.distributions.Categorical(logits=possible).entropy()
    close(found, expected, torch.float32)
    (of_logits,) = torch.autograd.grad(found, logits)
    (of_possible,) = torch.autograd.grad(expected, possible)
    assert of_logits[0, 1] == 0
    close(of_logits[:, [0, 2]], of_possible, torch.float32)


VIEWS = {
    "all": lambda z: z,
    "all but the last row": lambda z: z[:, :-1],
    "every other row": lambda z: z[:, ::2],
    "a sequence": lambda z: z[1],
    "some classes": lambda z: z[..., 3:9],
    "rows of classes": lambda z: z[1:, :, :5],
    "classes first": lambda z: z.movedim(-1, 0),
    "rows swapped": lambda z: z.transpose(0, 1),
    "rows swapped, and some": lambda z: z.transpose(0, 1)[1:3],
    "narrowed": lambda z: z.narrow(1, 2, 3),
    "split": lambda z: z.split(2, 1)[1],
    "in another order": lambda z: z[:, [2, 0]],
    "half as many": lambda z: z[:, 1:] / 2,
    "log-softmax of some": lambda z: z[:, 1:].log_softmax(-1),
    "softmax of rows swapped": lambda z: z.transpose(0, 1).softmax(-1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_strides_match_torch(name):
    """They decide whether a later reshape is a view, and changes with what it is a view of."""
    model, tokens, _ = make()
    expected = VIEWS[name](model(tokens)[0])
    with lowtide.defer_logits(model), warnings.catch_warnings():
        warnings.simplefilter("ignore", RealLogitsWarning)
        logits = VIEWS[name](model(tokens)[0])
        assert logits.stride() == expected.stride()
        real = logits.materialize()
        assert real.stride() == expected.stride()
        shares = expected.reshape(-1).data_ptr() == expected.data_ptr()
        made = real.reshape(-1)
        assert (made.data_ptr() == real.data_ptr()) is shares
        before = real.detach().clone()
        with torch.no_grad():
            made.div_(2)
        assert torch.equal(real.detach(), before / 2 if shares else before)


@pytest.mark.parametrize("name", ["all", "some classes", "a sequence"])
def test_detach_in_place_refused(name):
    model, tokens, _ = make()
    with lowtide.defer_logits(model) as deferral:
        logits = VIEWS[name](model(tokens)[0])
        for part in (logits, logits[..., :0]):
            with pytest.raises(RuntimeError, match=r"detach_ would .* in place; use detach\(\)"):
                part.detach_()
        assert logits.requires_grad
        assert deferral.materialized == {}


class Forwards(torch.autograd.Function):
    """Runs what it is given with gradients, as an outer Function that differentiates does."""

    @staticmethod
    def forward(ctx, run, hidden):
        with torch.enable_grad():
            return run(hidden).detach()


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, hidden):
        return head(hidden)

    @staticmethod
    def backward(ctx, upstream):
        return None, upstream


@pytest.mark.parametrize("leaves", ["a Function", "a reentrant checkpoint", "is given to a Function"])
def test_functions_within_a_function_would_lose_the_gradient(leaves):
    head = torch.nn.Linear(8, V)

    def run(hidden):
        if leaves == "a Function":
            logits = Inner.apply(head, hidden)
        elif leaves == "a reentrant checkpoint":
            logits = checkpoint(head, hidden, use_reentrant=True)
        else:
            return OwnLoss.apply(head(hidden))
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    hidden = torch.randn(5, 8, requires_grad=True)
    with lowtide.defer_logits(head, head=head), pytest.raises(RuntimeError, match="gradient"):
        Forwards.apply(run, hidden)


def test_dropout_that_is_off_keeps_logits_deferred():
    model, tokens, _ = make()
    with lowtide.defer_logits(model):
        logits = model(tokens)[0]
        with torch.no_grad():
            assert F.dropout(logits, 0.0, True) is logits
            assert F.dropout(logits, 0.3, training=False) is logits
        assert logits.requires_grad


def test_attribute_of_hidden_states_is_the_tensors():
    class Scaled(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) * getattr(hidden, "own_scale", 7.0)

    head, hidden = Scaled(8, V, bias=False), torch.randn(4, 8)
    hidden.own_scale = 0.5
    target = torch.arange(4)
    expected = F.cross_entropy(head(hidden), target)
    with lowtide.defer_logits(head, head=head):
        found = F.cross_entropy(head(hidden), target)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_tensor_cast_to_dtype_of_logits_keeps_them_deferred(dtype):
    model, tokens, _ = make(dtype=torch.float64)
    with lowtide.defer_logits(model) as deferral:
        logits = model(tokens)[0]
        mask = torch.arange(3, dtype=dtype)
        for found in (mask.to(logits), mask.type_as(logits)):
            assert found.dtype == torch.float64
            assert found.tolist() == [0, 1, 2]
        assert deferral.materialized == {}
