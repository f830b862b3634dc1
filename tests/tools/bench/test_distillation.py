"""`lowtide bench distillation`."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lowtide.cli.bench import loss
from lowtide.tools.bench import distillation
from lowtide.tools.bench.cases import CASES, IGNORE_INDEX, Mode
from lowtide.tools.bench.distillation import (
    DIVERGENCES,
    WORKSPACES,
    divergence_providers,
    exact_divergence,
    teacher,
)
from lowtide.tools.bench.measure import floor
from lowtide.tools.bench.truth import relative_error
from lowtide.tools.eager import eager_divergence
from tests.support.commands import invoke, rows_of, said

SMOKE = next(case for case in CASES if case.name == "smoke-cpu")
CASE = dataclasses.replace(SMOKE, tokens=40, features=24, classes=56, ignored=0.1)


@pytest.fixture(params=DIVERGENCES, ids=lambda divergence: divergence.name)
def divergence(request):
    return request.param


def by_probabilities(name, student, ignored_N):
    """The mean over the rows that are not ignored, from the probabilities, in float64."""
    heads = student, teacher(CASE)
    s_NV, t_NV = (F.linear(x_ND.double(), w_VD.double()).softmax(1) for x_ND, w_VD in heads)
    m_NV = (s_NV + t_NV) / 2

    def kl(p_NV, q_NV):
        return (p_NV * (p_NV / q_NV).log()).sum(1)

    loss_N = {
        "forward_kl": lambda: kl(t_NV, s_NV),
        "reverse_kl": lambda: kl(s_NV, t_NV),
        "jensen_shannon": lambda: (kl(t_NV, m_NV) + kl(s_NV, m_NV)) / 2,
    }[name]()
    return loss_N[~ignored_N].mean()


def test_truth_and_eager_match_probabilities(divergence):
    *student, target_N = inputs = CASE.inputs(requires_grad=True)
    ignored_N = target_N == IGNORE_INDEX
    assert ignored_N.sum() == 4
    want = by_probabilities(divergence.name, student, ignored_N)
    wants = (want.detach(), *torch.autograd.grad(want, student))
    eager = eager_divergence(*student, *teacher(CASE), divergence.beta, ignored_N)
    eagers = (eager.detach(), *torch.autograd.grad(eager, student))
    truths = exact_divergence(CASE, divergence.beta, *inputs)
    for right, got, truth in zip(wants, eagers, truths, strict=True):
        assert relative_error(got, right) < 1e-6
        assert relative_error(right, truth) < 1e-7  # float64, but for the gradients' rounding
    whole = eager_divergence(*student, *teacher(CASE), divergence.beta)
    right = by_probabilities(divergence.name, student, torch.zeros_like(ignored_N))
    assert whole.item() == pytest.approx(right.item(), rel=1e-6)


def test_floor_has_the_logits_of_both_heads(monkeypatch):
    products, sizes = torch.mm, []

    def mm(one, other, *, out):
        sizes.append((*one.shape, other.shape[1]))
        return products(one, other, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    floor(*CASE.inputs(requires_grad=True), Mode.STEP, heads=2)()
    N, D, V = CASE.tokens, CASE.features, CASE.classes
    assert sizes == [(N, D, V), (N, D, V), (N, V, D), (V, N, D)]


def test_liger_is_called_as_it_documents(divergence, monkeypatch):
    """A function of Liger's signature takes the call; its own kernels need CUDA."""

    def fused(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels=None,
        jsd_beta=0.5,
        ignore_index=-100,
        temperature=1.0,
    ):
        heads = student_input, student_weight, teacher_input, teacher_weight
        return eager_divergence(*heads, jsd_beta, shift_labels == ignore_index)

    module = SimpleNamespace(liger_fused_linear_jsd=fused)
    monkeypatch.setattr(distillation, "cuda_module", lambda name, device: module)
    (liger,) = (each for each in divergence_providers(divergence) if each.name == "liger")
    inputs = CASE.inputs(requires_grad=True)
    (got,) = liger.call(CASE, inputs).run()
    assert relative_error(got, exact_divergence(CASE, divergence.beta, *inputs)[0]) < 1e-6


def test_smoke_run(tmp_path):
    out = tmp_path / "distillation.csv"
    done = invoke("bench", "distillation", "--device", "cpu", "--smoke", "--csv", out)
    assert done.exit_code == 0, done.output
    rows = rows_of(out)
    names = [*WORKSPACES, "eager", "liger"]
    assert [(row["case"], row["provider"]) for row in rows] == [
        (f"smoke-cpu-{name}", provider)
        for name in ("forward_kl", "reverse_kl", "jensen_shannon")
        for provider in names
    ]
    logits_bytes = 4 * SMOKE.tokens * SMOKE.classes
    for row in rows:
        if row["provider"] == "liger":
            assert (row["status"], row["reason"]) == ("unavailable", "its kernels need CUDA")
            continue
        assert row["status"] == "ok", row["reason"]
        assert float(row["floor_ms"]) > 0
        assert 0 < float(row["ms_p20"]) <= float(row["ms"]) <= float(row["ms_p80"])
        assert float(row["ratio"]) > 0
        assert max(float(row[f"{name}_error"]) for name in ("loss", "grad_input", "grad_weight")) < 1e-6
        if row["provider"] == "eager":
            assert int(row["peak_bytes"]) >= 4 * logits_bytes
        else:
            assert row["workspace"] == str(WORKSPACES[row["provider"]] or "")
            assert int(row["peak_bytes"]) < 4 * logits_bytes
    assert "smoke-cpu-jensen_shannon: 256 x 64 x 1024 float32 on cpu, step" in said(done)


def test_chosen_by_name(tmp_path):
    out = tmp_path / "chosen.csv"
    chosen = "--case smoke-cpu --divergence reverse_kl --provider eager --provider lowtide-1GiB"
    done = invoke("bench", "distillation", "--device", "cpu", *chosen.split(), "--out", out)
    assert done.exit_code == 0, done.output
    found = [(row["case"], row["provider"], row["workspace"]) for row in rows_of(out)]
    assert found == [
        ("smoke-cpu-reverse_kl", "eager", ""),
        ("smoke-cpu-reverse_kl", "lowtide-1GiB", str(2**30)),
    ]


def test_shape_of_each_device(monkeypatch):
    seen = []
    monkeypatch.setattr(loss, "print_tables", lambda tables, *rest: seen.extend(tables))
    assert invoke("bench", "distillation", "--device", "cpu").exit_code == 0
    names = [f"cpu-small-{divergence.name}" for divergence in DIVERGENCES]
    assert [(table.name, table.total) for table in seen] == [(name, 5) for name in names]
    (card,) = loss._cases("cuda", None, False, loss.DISTILLATION_CASE)
    assert (card.tokens, card.features, card.classes) == (8192, 4096, 128256)


@pytest.mark.parametrize(
    ("option", "typo", "known"),
    [("--divergence", "js", "jensen_shannon"), ("--provider", "lowtide-2GiB", "lowtide-1GiB")],
)
def test_name_unknown(option, typo, known):
    done = invoke("bench", "distillation", "--device", "cpu", option, typo)
    assert done.exit_code == 2
    assert f"{typo!r} is not one of" in said(done)
    assert known in said(done)
