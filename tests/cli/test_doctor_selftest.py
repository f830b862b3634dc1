"""`lowtide doctor --selftest`: it runs fifty calls, and sees a wrong result of each kind."""

import re
from types import SimpleNamespace

import pytest
import torch

import lowtide
from lowtide.tools.doctor import selftest
from tests.support.commands import invoke, said

# A tenth of them, so that all of one kind of call are there: the report of all takes ten seconds.
NAMES = ("loss, mean", "loss, soft cap", "chunked loss", "deferred logits", "InfoNCE", "attention, window")
SOME = tuple(case for case in selftest.CASES if case.name in NAMES and case.dtype == torch.float32)


def test_fifty_cases_by_name():
    assert len(selftest.CASES) == len({(case.name, case.dtype) for case in selftest.CASES}) == 50
    assert {case.dtype for case in selftest.CASES} == {
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16)
    }


@pytest.mark.extended
def test_all_are_right_here():
    for outcome in selftest.run("cpu"):
        assert outcome.passed, outcome


def test_report(monkeypatch):
    monkeypatch.setattr(selftest, "CASES", SOME)
    done = invoke("doctor", "--selftest", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert f"lowtide: {lowtide.__version__}" in done.output
    assert f"torch: {torch.__version__}" in done.output
    lines = re.findall(r"^ok   (.+?) +float32 +(\S+) +(\S+) +\d+$", done.output, flags=re.MULTILINE)
    assert [name for name, _, _ in lines] == [*NAMES]
    assert all(0 < float(error) <= float(allowed) < 2e-5 for _, error, allowed in lines)
    assert re.search(r"^6 of 6 calls are right, in \d+ s$", done.output, flags=re.MULTILINE)


@pytest.mark.parametrize("wrong", ["value", "gradient", "nan", "raises"])
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_a_wrong_result_is_seen(case, wrong):
    """Off by a thousandth in one of fifty rows, or in the gradients alone."""

    def ours(given):
        found = case.ours(given)
        if wrong == "raises":
            raise RuntimeError("no such kernel")
        if wrong == "gradient":
            shift = 1e-3 * given["input" if "input" in given else "query"].square().sum()
            return found + shift - shift.detach()
        factor = torch.ones_like(found)
        factor.view(-1)[:: max(found.numel() // 2, 1)] = 1.001 if wrong == "value" else torch.nan
        return found * factor

    found = selftest._outcome(case._replace(ours=ours), "cpu")
    assert not found.passed
    assert found.reason == ("RuntimeError: no such kernel" if wrong == "raises" else "")
    assert selftest._outcome(case, "cpu").passed


def test_a_wrong_result_ends_with_one(monkeypatch):
    broken = SOME[0]._replace(ours=lambda given: 1.01 * SOME[0].ours(given))
    monkeypatch.setattr(selftest, "CASES", (broken, SOME[1]))
    done = invoke("doctor", "--selftest", "--device", "cpu")
    assert done.exit_code == 1
    assert "FAIL loss, mean" in done.output
    assert "1 of 2 calls are right" in done.output


def test_float32_products_are_exact_meanwhile_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(
        selftest,
        "_outcome",
        lambda *_: seen.append(torch.get_float32_matmul_precision()) or SimpleNamespace(),
    )
    monkeypatch.setattr(selftest, "CASES", SOME[:1])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        list(selftest.run("cpu"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu"), "goes together with --selftest"),
        (("--selftest", "attention"), "runs by itself"),
    ],
)
def test_arguments_refused(arguments, message):
    done = invoke("doctor", *arguments)
    assert done.exit_code == 2
    assert message in said(done)
