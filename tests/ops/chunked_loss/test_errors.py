"""Bad input: what is wrong, what came, and what to do."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import MODES, B, D, T, V, call, cross_entropy, make

WEIGHT = torch.randn(V, D, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (partial(cross_entropy, reduction="none"), r"value for each row, \[5\]; add .sum\(\), or pass mode="),
        (partial(cross_entropy, reduction="mean"), "got their mean"),
        (lambda logits, labels: logits.mean(), "got their mean"),
        (lambda logits, labels: logits.square().mean(-1).mean(), "got their mean"),
        (
            lambda logits, labels: -logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None]).mean(),
            "their mean",
        ),
        (lambda logits, labels: F.cross_entropy(logits.float(), labels).double(), "got their mean"),
        (lambda logits, labels: 0.5 * F.cross_entropy(logits, labels), "got their mean"),
        (lambda logits, labels: F.cross_entropy(logits, labels) / 4, "got their mean"),
        (lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1), "got their mean"),
        (lambda logits, labels: F.cross_entropy(logits, logits.detach().softmax(-1)), "got their mean"),
        (
            lambda logits, labels: cross_entropy(logits, labels) + 0.1 * logits.square().mean(),
            "got their mean",
        ),
        (lambda logits, labels: divergence(logits, "batchmean"), "got their mean"),
        (lambda logits, labels: 2.0**2 * divergence(logits, "batchmean"), "got their mean"),
        (lambda logits, labels: logits.square().sum() / len(logits), "got their mean"),
        (lambda logits, labels: -logits.square().sum() * (1 / len(logits)), "got their mean"),
        (lambda logits, labels: 4 * F.cross_entropy(logits, labels.clamp(min=0)), "got their mean"),
        (lambda logits, labels: 9 * logits.sum() + 0.01 * logits.square().mean(), "got their mean"),
        (partial(F.kl_div, reduction="batchmean"), "reduces by the mean"),
        (nn.KLDivLoss(reduction="batchmean"), "reduces by the mean"),
        (F.cross_entropy, "reduces by the mean.*reduction='sum'"),
        (partial(F.cross_entropy, label_smoothing=0.1), "reduces by the mean"),
        (nn.CrossEntropyLoss(), "reduces by the mean"),
        (lambda logits, labels: logits.sum(0), r"0-d, got \[21\] for 5 rows"),
        (lambda logits, labels: logits, r"0-d, got \[5, 21\] for 5 rows"),
        (lambda logits, labels: logits.sum().view(1), r"0-d, got \[1\] for 5 rows"),
        (lambda logits, labels: (logits.sum(), {}), "has_aux=True"),
        (lambda logits, labels: 0.0, "must return a tensor, got float"),
        (lambda logits, labels: logits.argmax(), "floating-point tensor, got torch.int64"),
    ],
)
def test_reduction_not_sum(loss_fn, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(loss_fn, chunk_size=5)


def test_reduction_mixed():
    def loss_fn(logits, labels):
        return logits.sum(1) if len(logits) == 5 else logits.sum()

    with pytest.raises(ValueError, match="got both"):
        call(loss_fn, chunk_size=5, mode="recompute")


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda logits, labels: logits.sum(0).mean(),
        lambda logits, labels: logits.mean(-1).sum(),
        lambda logits, labels: F.cross_entropy(logits, labels) * (labels != -100).sum(),
        lambda logits, labels: -F.cross_entropy(logits, labels) * int((labels != -100).sum()),
        lambda logits, labels: 0.5 * (F.cross_entropy(logits, labels) * len(labels)) / 7,
        lambda logits, labels: F.cross_entropy(logits, logits.detach().softmax(-1), reduction="sum") / 5,
        lambda logits, labels: F.cross_entropy(
            logits, labels.clamp(min=0), label_smoothing=0.1, reduction="sum"
        ),
        lambda logits, labels: divergence(logits, "sum") / 5,
        lambda logits, labels: sum(map(F.cross_entropy, logits, labels.clamp(min=0))),
        lambda logits, labels: sum(F.mse_loss(row, -row) for row in logits[:, :5]),
        lambda logits, labels: sum(row.mean() for row in logits[:, :5]),
        partial(F.cross_entropy, reduction="sum"),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
)
def test_reduction_sum_accepted(loss_fn):
    call(loss_fn, chunk_size=5).backward()


def divergence(logits, reduction):
    logits = logits.log_softmax(-1)
    return F.kl_div(logits, logits.detach().cos().softmax(-1), reduction=reduction)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_sum_that_looks_like_a_mean(mode, dropout):
    """It is computed twice more for the first chunk alone, which does not change the result."""
    calls = []

    def loss_fn(logits, labels):
        calls.append(len(logits))
        return logits.square().sum() / 5

    head = nn.Sequential(nn.Dropout(dropout), nn.Linear(D, V)).double()
    hidden = torch.randn(15, D, dtype=torch.float64, requires_grad=True)
    labels = torch.zeros(15, dtype=torch.int64)
    torch.manual_seed(0)
    loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=5, mode=mode)
    assert calls == ([5, 5, 5] if dropout else [5, 2, 4, 5, 5])
    loss.backward()
    torch.manual_seed(0)
    again = hidden.detach().requires_grad_()
    expected = sum(head(chunk).square().sum() for chunk in again.split(5)) / 5
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, again.grad)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda logits, labels: logits.sum(), r"\(sum, dict\), got Tensor"),
        (lambda logits, labels: (logits.sum(), logits), r"\(sum, dict\), got Tensor as aux"),
        (
            lambda logits, labels: (logits.sum(), {"a": "b"}),
            r"aux\['a'\] must be a tensor or a number, got str",
        ),
        (lambda logits, labels: (logits.sum(), {"a": labels}), r"aux\['a'\] must be a sum over rows"),
    ],
)
def test_errors_of_aux(loss_fn, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(loss_fn, chunk_size=5, has_aux=True)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ((torch.zeros(B, T - 1),), r"token_tensors\[0\] must have the rows of hidden, \[2, 9\]"),
        ((torch.zeros(B, T), torch.zeros(T)), r"token_tensors\[1\] must have the rows.*partial\(loss_fn"),
        (
            (torch.zeros(B, T, device="meta"),),
            r"token_tensors\[0\] must be on hidden's device \(cpu\), got meta",
        ),
    ],
)
def test_errors_of_row_counts(rest, message):
    with pytest.raises(ValueError, match=message):
        call(cross_entropy, None, None, *rest)
    with pytest.raises(ValueError, match=r"hidden\[1\] must have the rows"):
        call(cross_entropy, None, (torch.zeros(B, T, D), torch.zeros(T, B, D)))


def test_errors_of_hidden():
    with pytest.raises(TypeError, match="hidden must be a tensor or a tuple of tensors, got NoneType"):
        chunked_loss(cross_entropy, nn.Linear(D, V))
    with pytest.raises(TypeError, match="hidden must be a tensor or a tuple of tensors, got list"):
        call(cross_entropy, None, [1.0])
    with pytest.raises(ValueError, match=r"hidden must be \[..., T, D\], got \[8\]"):
        call(cross_entropy, None, torch.zeros(D))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode must be one of 'gradient_in_forward', 'recompute', got 'fast'"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"chunk_size": 2.5}, "chunk_size must be an int, rows, got 2.5"),
        ({"workspace": -1}, "workspace must be at least 1, got -1"),
        ({"workspace": 1e9}, "workspace must be an int, bytes"),
        ({"chunk_size": 5, "workspace": 100000}, "must not both be given"),
        ({"workspace": 100}, r"a chunk of one row, which takes \d+ bytes, got 100 bytes"),
    ],
)
def test_errors_of_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(**options)
    if "workspace" not in options or options["workspace"] == -1:
        with pytest.raises((ValueError, TypeError), match=message):
            chunked_loss(**options)(cross_entropy)(*make("linear")[:2])


def test_errors_of_callables():
    advised = r"pass the nn\.Linear itself, or functools\.partial\(F\.linear, weight=\.\.\.\)$"
    for weight, kind in ((WEIGHT, "Tensor"), (nn.Linear(D, V).weight, "Parameter")):
        with pytest.raises(TypeError, match=f"head must be callable, got {kind}; {advised}") as caught:
            chunked_loss(cross_entropy, weight, torch.zeros(B, T, D))
        assert isinstance(caught.value, RuntimeError)
    with pytest.raises(TypeError, match=r"head must be callable, got int$"):
        chunked_loss(cross_entropy, 3, torch.zeros(B, T, D))
    with pytest.raises(
        TypeError, match=r"loss_fn must be callable, got Tensor; pass \(loss_fn, head, hidden"
    ):
        chunked_loss(torch.zeros(B, T, D), nn.Linear(D, V), torch.zeros(B, T))
    with pytest.raises(TypeError, match="loss_fn must be callable, got str"):
        call("cross_entropy")


SWAPPED = r"hidden must be floating-point .*, got torch\.int64, .*; labels come after hidden$"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "first", [nn.LayerNorm(D), nn.Identity(), nn.GELU()], ids=lambda each: type(each).__name__
)
def test_labels_in_the_place_of_hidden(first, mode):
    head, (_, hidden, labels) = nn.Sequential(first, nn.Linear(D, V)).double(), make("linear")
    with pytest.raises(TypeError, match=SWAPPED) as caught:
        chunked_loss(cross_entropy, head, labels, hidden, mode=mode)
    assert isinstance(caught.value, RuntimeError)
    assert type(caught.value.__cause__) in (RuntimeError, NotImplementedError)
    assert str(caught.value.__cause__) in str(caught.value)
    with torch.no_grad(), pytest.raises(TypeError, match=SWAPPED):
        chunked_loss(cross_entropy, head, labels, hidden)
    with pytest.raises(
        ValueError, match=r"got \[18\] of torch\.int64; pass \(loss_fn, head, hidden, \.\.\.\) in"
    ):
        chunked_loss(cross_entropy, head, labels.flatten(), hidden.flatten(0, 1))


def test_integers_that_head_looks_up():
    """They are no mistake, and what else the head raises stays as it is."""
    table, words = nn.Embedding(V, D), torch.arange(2 * 3).view(2, 3)
    square = lambda out, target: (out - target).square().sum()  # noqa: E731
    chunked_loss(square, table, words, torch.zeros(2, 3, D)).backward()
    assert table.weight.grad.count_nonzero()

    def fails(table, hidden):
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"):
        chunked_loss(square, partial(fails, table), words, torch.zeros(2, 3, D))


def test_errors_of_devices():
    with pytest.raises(
        ValueError, match=r"head.weight must be on hidden's device \(cpu\), got meta; move one"
    ):
        call(head=nn.Linear(D, V, device="meta"))


def test_errors_of_complex_parameter():
    weight = torch.randn(V, D, dtype=torch.complex128, requires_grad=True)
    with pytest.raises(
        TypeError, match=r"head.weight must not be complex, got torch.complex128.*view_as_real"
    ):
        call(head=partial(lambda hidden, weight: ((hidden + 0j) @ weight.t()).abs(), weight=weight))


def test_nothing_requires_gradient():
    head, hidden, labels = make("linear")
    head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"nothing here needs a gradient.*torch.no_grad\(\)"):
        chunked_loss(cross_entropy, head, hidden.detach(), labels)
    with torch.no_grad():
        assert chunked_loss(cross_entropy, head, hidden.detach(), labels).isfinite()


@pytest.mark.parametrize("mode", MODES)
def test_closure_refused(mode):
    """It would get no gradient, and nobody would know."""
    linear, temperature = nn.Linear(D, V).double(), torch.tensor(2.0, requires_grad=True)
    options = {"mode": mode, "chunk_size": 5}
    with pytest.raises(ValueError, match=r"closure or a global: linear.weight, linear.bias would get none"):
        call(head=lambda hidden: linear(hidden), **options)
    with pytest.raises(ValueError, match=r"WEIGHT would get none.*functools.partial"):
        call(head=lambda hidden: F.linear(hidden, WEIGHT), **options)
    with pytest.raises(ValueError, match="temperature would get none"):
        call(lambda logits, labels: cross_entropy(logits / temperature, labels), **options)
    made = linear.weight * 2
    with pytest.raises(ValueError, match=r"linear.weight|a tensor of shape"):
        call(head=lambda hidden: F.linear(hidden, made), **options)

    class Trainer:
        def __init__(self):
            self.head = linear

        def loss(self, hidden, labels):
            return chunked_loss(cross_entropy, lambda hidden: self.head(hidden), hidden, labels, **options)

    _, hidden, labels = make("linear")
    with pytest.raises(ValueError, match=r"self.head.weight, self.head.bias would get none"):
        Trainer().loss(hidden, labels)


def test_closure_frozen_accepted():
    teacher = nn.Linear(D, V).double().requires_grad_(False)
    head, hidden, _ = make("linear")

    def distilled(logits, hidden):
        return F.kl_div(logits.log_softmax(-1), teacher(hidden).softmax(-1), reduction="sum")

    chunked_loss(distilled, head, hidden, hidden.detach()).backward()


def test_mean_of_masked_rows():
    """Rows whose loss is 0 do not hide that a chunk's loss is a mean."""
    head, hidden = nn.Linear(D, V).double(), torch.randn(64, D, dtype=torch.float64, requires_grad=True)
    labels, mask = torch.randint(V, (64,)), (torch.arange(64) >= 9).double()

    def loss_fn(logits, labels, mask):
        return (F.cross_entropy(logits, labels, reduction="none") * mask).mean()

    with pytest.raises(ValueError, match="got their mean"):
        chunked_loss(loss_fn, head, hidden, labels, mask, chunk_size=16)


def test_suspected_loss_that_asks_for_its_rows():
    """The check whether losses add up gives other numbers of rows, which a function may refuse."""
    head, hidden = nn.Linear(D, V).double(), torch.randn(64, D, dtype=torch.float64, requires_grad=True)

    def loss_fn(logits, labels):
        assert len(logits) == 16
        return F.cross_entropy(logits, labels, reduction="sum") / 16

    labels = torch.randint(V, (64,))
    loss = chunked_loss(loss_fn, head, hidden, labels, chunk_size=16)
    torch.testing.assert_close(loss, F.cross_entropy(head(hidden), labels, reduction="sum") / 16)
