"""torch's kl_div of two deferred heads is the operator's, for any temperature and reduction.

Shapes: B sequences, T tokens, V classes.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.deferred import RealLogitsWarning
from lowtide.deferred.recorded import chunks, expression
from tests.deferred.helpers import B, T, V, differentiated, make, within_eager
from tests.ops.chunked_loss.helpers import close

FUSED = {
    "batchmean": lambda s, t: F.kl_div(
        F.log_softmax(s / 2, -1), F.softmax(t / 2, -1), reduction="batchmean"
    ) * 4,
    "sum, rows flat": lambda s, t: F.kl_div(
        (s / 0.7).log_softmax(-1).view(-1, V), (t / 0.7).softmax(-1).view(-1, V), reduction="sum"
    ),
    "mean": lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="mean"),
    "log target": lambda s, t: F.kl_div(
        s.log_softmax(-1), t.log_softmax(-1), reduction="sum", log_target=True
    ),
    "capped": lambda s, t: F.kl_div(
        (3 * torch.tanh(s / 3) / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="sum"
    ),
    "module": lambda s, t: torch.nn.KLDivLoss(reduction="batchmean")(s.log_softmax(-1), t.softmax(-1)),
    "detached": lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1).detach(), reduction="sum"),
    "shifted": lambda s, t: F.kl_div(
        s[:, :-1].log_softmax(-1), t[:, :-1].softmax(-1), reduction="batchmean"
    ),
}  # fmt: skip
# The teacher's logits become real, and the student's do not.
REAL_TEACHER = {
    "two temperatures": lambda s, t: F.kl_div((s / 2).log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "two temperatures, log target": lambda s, t: F.kl_div(
        (s / 2).log_softmax(-1), t.log_softmax(-1), reduction="sum", log_target=True
    ),
    "student without an operator": lambda s, t: F.kl_div(
        (s * torch.linspace(0.5, 2, V, dtype=s.dtype)).log_softmax(-1), t.softmax(-1), reduction="sum"
    ),
    "not normalised": lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1) * 0.5, reduction="sum"),
}
REAL = {
    "of single classes": lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="none").sum(-1),
    "trained teacher": lambda s, t: F.kl_div(s.log_softmax(-1), (2 * s).softmax(-1), reduction="sum"),
}


def heads(dtype=torch.float64):
    """A student, a frozen teacher with other weights, and tokens."""
    student, tokens, _ = make(bias=True, dtype=dtype)
    teacher, _, _ = make(bias=True, dtype=dtype)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(3)
    return student, teacher.requires_grad_(False), tokens


def found_by(use, student, teacher, tokens):
    with torch.no_grad():
        of_teacher = teacher(tokens)[0]
    return differentiated(student, use(student(tokens)[0], of_teacher))


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", FUSED)
def test_divergence_of_deferred_heads(monkeypatch, name):
    student, teacher, tokens = heads()
    expected = found_by(FUSED[name], student, teacher, tokens)
    monkeypatch.setattr(chunks, "by_rows", None)
    with lowtide.defer_logits(student) as of_student, lowtide.defer_logits(teacher) as of_teacher:
        found = found_by(FUSED[name], student, teacher, tokens)
    close(found, expected)
    assert (of_student.fused, of_student.materialized, of_teacher.materialized) == (1, {}, {})


def test_divergence_in_few_digits():
    student, teacher, tokens = heads(torch.bfloat16)
    use = FUSED["batchmean"]
    eager = found_by(lambda s, t: use(s.float(), t.float()), student, teacher, tokens)
    with lowtide.defer_logits(student), lowtide.defer_logits(teacher):
        found = found_by(lambda s, t: use(s.float(), t.float()), student, teacher, tokens)
    exact = found_by(use, student.double(), teacher.double(), tokens)
    for ours, theirs, true in zip(found, eager, exact):
        within_eager(ours, theirs, true, torch.bfloat16)


@pytest.mark.parametrize("name", REAL)
def test_other_divergences_have_real_logits(name):
    student, teacher, tokens = heads()
    expected = found_by(REAL[name], student, teacher, tokens)
    warning = pytest.warns(RealLogitsWarning, match="kl_div")
    with lowtide.defer_logits(student) as deferral, lowtide.defer_logits(teacher), warning:
        close(found_by(REAL[name], student, teacher, tokens), expected)
    assert deferral.materialized


CASES = [*((name, True) for name in REAL_TEACHER), *((name, False) for name in FUSED | REAL_TEACHER)]


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("name", "in_training"), CASES)
def test_divergence_without_the_students_logits(name, in_training):
    """Whatever the teacher: one in eval mode has real logits, as one that is not deferred."""
    student, teacher, tokens = heads()
    use = (FUSED | REAL_TEACHER)[name]
    expected = found_by(use, student, teacher, tokens)
    teacher.train(in_training)
    with lowtide.defer_logits(student) as deferral, lowtide.defer_logits(teacher):
        found = found_by(use, student, teacher, tokens)
    close(found, expected, roundings=2)
    assert (deferral.fused, deferral.materialized) == (1, {})


@pytest.mark.parametrize("log_target", [False, True])
def test_small_divergence_keeps_its_digits(log_target):
    """It is the difference of a cross-entropy and an entropy that are thousands of times larger."""
    student, _, _ = make(bias=True, dtype=torch.float64)
    tokens = torch.randint(V, (16, 64))
    with torch.no_grad():
        student.lm_head.weight.mul_(3)
        logits = student(tokens)[0]
        log_p = (logits + 0.02 * torch.randn_like(logits)).log_softmax(-1)
    target = log_p if log_target else log_p.exp()

    def use(model, dtype):
        log_q = model(tokens)[0].log_softmax(-1)
        loss = F.kl_div(log_q, target.to(dtype), reduction="batchmean", log_target=log_target)
        return differentiated(model, loss)

    exact = use(student, torch.float64)
    student.float()
    eager = use(student, torch.float32)
    with lowtide.defer_logits(student) as deferral:
        found = use(student, torch.float32)
    assert deferral.materialized == {}
    assert exact[0] < 0.02 * len(tokens[0])
    for ours, theirs, true in zip(found, eager, exact):
        within_eager(ours, theirs, true, torch.float32)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
def test_infinite_divergence():
    student, teacher, tokens = heads()
    teacher.eval()
    without = torch.zeros(V, dtype=torch.float64)
    without[3] = -torch.inf
    use = lambda s, t: F.kl_div((s + without).log_softmax(-1), t.softmax(-1), reduction="sum")  # noqa: E731
    with lowtide.defer_logits(student):
        assert found_by(use, student, teacher, tokens)[0] == torch.inf


@pytest.mark.parametrize("teacher_is", ["deferred", "real"])
@pytest.mark.parametrize("how", ["no_grad", "detach"])
def test_divergence_without_gradients(how, teacher_is):
    student, teacher, tokens = heads()
    teacher.train(teacher_is == "deferred")

    def found():
        s, t = student(tokens)[0], teacher(tokens)[0]
        log_q = s.log_softmax(-1).detach() if how == "detach" else s.log_softmax(-1)
        return F.kl_div(log_q, t.softmax(-1), reduction="batchmean")

    with torch.no_grad() if how == "no_grad" else contextlib.nullcontext():
        expected = found()
        with lowtide.defer_logits(student) as deferral, lowtide.defer_logits(teacher):
            divergence = found()
    assert not divergence.requires_grad
    assert deferral.materialized == {}
    torch.testing.assert_close(divergence, expected)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("teacher_is", ["deferred", "real"])
def test_divergence_has_the_wider_dtype(dtypes, teacher_is):
    student, teacher, tokens = heads(torch.float32)
    of_student, of_teacher = (getattr(torch, each) for each in dtypes)
    use = lambda s, t: F.kl_div(  # noqa: E731
        s.to(of_student).log_softmax(-1), t.to(of_teacher).softmax(-1), reduction="sum"
    )
    expected = found_by(use, student, teacher, tokens)
    teacher.train(teacher_is == "deferred")
    with lowtide.defer_logits(student) as deferral, lowtide.defer_logits(teacher):
        found = found_by(use, student, teacher, tokens)
    assert found[0].dtype == expected[0].dtype
    for got, wanted in zip(found, expected):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2)
    assert deferral.materialized == {}


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("teacher_is", ["deferred", "real"])
def test_divergence_in_half_precision_is_float32(autocast, teacher_is):
    """Gradients have the factor that the loss is multiplied by, which bfloat16 would round."""
    student, teacher, tokens = heads(torch.float32 if autocast else torch.bfloat16)
    use = lambda s, t: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="sum")  # noqa: E731
    teacher.train(teacher_is == "deferred")
    factor = 1 + 2.0**-9  # halfway between two numbers of bfloat16
    with lowtide.defer_logits(student), lowtide.defer_logits(teacher):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = use(student(tokens)[0], teacher(tokens)[0].detach())
        upstream = []
        loss.register_hook(upstream.append)
        (loss * factor).backward()
    assert loss.dtype == torch.float32
    assert upstream[0].item() == factor


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize("divided", ["is_sharded", "data_mesh"])
def test_divided_head_has_real_logits(monkeypatch, divided):
    """No operator takes class probabilities of a head that is divided over ranks."""
    student, teacher, tokens = heads()
    use = FUSED["batchmean"]
    expected = found_by(use, student, teacher, tokens)
    monkeypatch.setattr(expression, divided, lambda node: True)
    monkeypatch.setattr(expression, "with_whole_weights", lambda node: node)
    with lowtide.defer_logits(student) as deferral:
        found = found_by(use, student, teacher, tokens)
    close(found, expected)
    assert deferral.materialized == {"torch.kl_div": 1}


def test_divergence_of_one_row():
    student, teacher, tokens = heads()
    use = lambda s, t: F.kl_div(s[0, 0].log_softmax(-1), t[0, 0].softmax(-1), reduction="sum")  # noqa: E731
    expected = found_by(use, student, teacher, tokens)
    for in_training in (True, False):
        teacher.train(in_training)
        with lowtide.defer_logits(student) as deferral, lowtide.defer_logits(teacher):
            close(found_by(use, student, teacher, tokens), expected, roundings=40)
        assert deferral.materialized == {}


def test_real_student_beside_a_deferred_teacher():
    student, teacher, tokens = heads()
    expected = found_by(FUSED["batchmean"], student, teacher, tokens)
    with lowtide.defer_logits(teacher), pytest.warns(RealLogitsWarning, match="kl_div"):
        close(found_by(FUSED["batchmean"], student, teacher, tokens), expected)


def test_divergence_of_many_rows_takes_its_workspace():
    student, teacher, _ = heads(torch.float32)
    tokens = torch.randint(V, (B, 400 * T))
    with lowtide.defer_logits(student, workspace=2**20), lowtide.defer_logits(teacher):
        use = FUSED["batchmean"]
        found_by(use, student, teacher, tokens)
        with lowtide.peak_memory("cpu") as peak:
            found_by(use, student, teacher, tokens)
    assert peak.largest < B * 400 * T * V * 4 / 3
