"""Real logits are made once, in the graph that they were recorded in, with the memory and the
strides of the model's own.
"""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.proxies.logits import DeferredLogits
from tests.deferred.helpers import B, T, V, make, plain_and_deferred
from tests.ops.chunked_loss.helpers import close


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
        """The clone may be changed, because exp() needs its own result for its gradient."""
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

    def test_views_change_with_logits(self):
        model, tokens, targets = make()

        def use(model):
            logits = model(tokens)[0]
            flat = logits.view(-1, V)
            logits[..., 0] = 0.0
            return F.cross_entropy(flat, targets.view(-1), ignore_index=-1)

        expected, found, _ = plain_and_deferred(model, use)
        close(found, expected)

    def test_logits_refused_after_change_of_a_view_made_before(self):
        model, tokens, targets = make()
        with lowtide.defer_logits(model):
            logits = model(tokens)[0]
            some = logits[:, 1:]
            some.sin()
            some.mul_(2)
            with pytest.raises(RuntimeError, match=r"changed in place \(Tensor.mul_\)"):
                F.cross_entropy(logits.view(-1, V), targets.view(-1))

    @pytest.mark.parametrize("operator", ["+=", "-=", "*=", "/=", "//=", "%=", "**="])
    def test_in_place_operators_seen(self, operator):
        model, tokens, _ = make()

        def changed():
            logits = model(tokens)[0]
            names = {"z": logits, "u": logits.detach()}
            exec(f"z {operator} 2", names)
            return names["u"].sum()

        with torch.no_grad():
            expected = changed()
            with lowtide.defer_logits(model):
                assert changed() == expected

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
