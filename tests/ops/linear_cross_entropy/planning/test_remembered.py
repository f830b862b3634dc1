"""What is decided for a call is decided once for all calls that are alike, and for no others."""

import gc
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.operator.arguments import call_of
from lowtide.ops.linear_cross_entropy.planning import remembered, requirements
from tests.support.loss import (
    check,
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
)
from tests.support.rehearsals import in_rehearsal

MADE = ["engine", "operands", "plan"]


@pytest.fixture
def decided(monkeypatch):
    """What is decided, and not remembered."""
    found = []

    def count(name, what):
        decide = getattr(planner, name)

        def counted(*arguments):
            if not in_rehearsal():
                found.append(what)
            return decide(*arguments)

        monkeypatch.setattr(planner, name, counted)

    count("choose_backend", "engine")
    count("check_engine", "operands")
    count("_memory", "plan")
    return found


def shifted(tensor):
    """The same numbers and strides, one element later in memory."""
    wider = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return wider[1:].view(tensor.shape).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def by_columns(tensor):
    return tensor.detach().t().contiguous().t().requires_grad_()


def test_like_call_is_not_decided_again(device, decided):
    inputs = make_inputs(device=device, bias=True)
    for other in (inputs, make_inputs(device=device, bias=True)):
        check(differentiate(fused, other, z_loss=0.1), other, z_loss=0.1)
        assert decided == MADE


def test_like_log_probs_are_not_decided_again(device, decided):
    """Backward plans its walk, which is that of forward."""
    inputs = make_inputs(device=device)
    for _ in range(2):
        upstream = tuple(torch.randn(len(inputs.target), device=device) for _ in range(3))
        found = differentiate_log_probs(fused_log_probs, inputs, upstream)
        check_log_probs(found, inputs, upstream)
        assert decided == MADE


CHANGES = {
    "tokens": lambda inputs: make_inputs(N=38, device=inputs.input.device.type),
    "classes": lambda inputs: make_inputs(V=64, device=inputs.input.device.type),
    "dtype": lambda inputs: inputs.to(torch.float64),
    "bias": lambda inputs: make_inputs(bias=True, device=inputs.input.device.type),
    "class weights": lambda inputs: make_inputs(class_weight=True, device=inputs.input.device.type),
    "probabilities": lambda inputs: make_inputs(probabilities=True, device=inputs.input.device.type),
    "strides of the weight": lambda inputs: replace(inputs, linear_weight=by_columns(inputs.linear_weight)),
    "strides of the input": lambda inputs: replace(inputs, input=by_columns(inputs.input)),
    "alignment of the weight": lambda inputs: replace(inputs, linear_weight=shifted(inputs.linear_weight)),
    "alignment of the input": lambda inputs: replace(inputs, input=shifted(inputs.input)),
    "frozen weight": lambda inputs: replace(inputs, linear_weight=inputs.linear_weight.detach()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_are_decided_anew(device, decided, change):
    inputs = make_inputs(device=device)
    fused(inputs)
    decided.clear()
    other = CHANGES[change](inputs)
    check(differentiate(fused, other), other)
    assert decided == MADE


OPTIONS = [
    {"workspace": 1 << 20},
    {"softcap": 5.0},
    {"z_loss": 0.1},
    {"label_smoothing": 0.1},
    {"reduction": "sum"},
    {"ignore_index": 3},
    {"backend": "torch"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_other_options_are_decided_anew(device, decided, options):
    inputs = make_inputs(device=device)
    fused(inputs)
    decided.clear()
    plain = {name: value for name, value in options.items() if name not in ("workspace", "backend")}
    if "ignore_index" in options:
        inputs = replace(inputs, target=inputs.target.clamp(min=3))
    check(differentiate(fused, inputs, **options), inputs, **plain)
    assert decided == MADE


def test_autocast_and_modes_are_decided_anew(device, decided):
    inputs = make_inputs(device=device)
    fused(inputs)
    # In bfloat16 a Hopper card chooses between two engines by the plans of both.
    half = torch.float16 if device == "cuda" else torch.bfloat16
    for mode in (torch.autocast(device, half), torch.no_grad()):
        decided.clear()
        with mode:
            fused(inputs)
        assert decided == MADE


def test_products_switched_off(decided):
    """An engine of the CPU depends on oneDNN, which a process may switch off and on again."""
    inputs = make_inputs()
    fused(inputs)
    decided.clear()
    before = torch.backends.mkldnn.enabled
    try:
        torch.backends.mkldnn.enabled = not before
        fused(inputs)
    finally:
        torch.backends.mkldnn.enabled = before
    assert decided == MADE


def test_address_that_tensor_maps_cannot_read(monkeypatch):
    """A graph keeps its engine. A tensor that begins elsewhere is copied, if one alike was not."""
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: True)
    monkeypatch.setattr(requirements, "reason_against_triton", lambda *_: None)
    x, w = torch.randn(6, 8), torch.randn(16, 8)
    labels, options = Labels(torch.zeros(6, dtype=torch.long)), Options(engine="exponentials")
    call = call_of(Head((x,), (w,)), labels, (True,) * 4, options, log_probs=False)
    for _ in range(2):
        assert planner.readable(call).head.weights[0] is w
        other = shifted(w)
        found = planner.readable(call._replace(head=Head((x,), (other,)))).head
        assert found.inputs[0] is x
        assert found.weights[0] is not other
        assert found.weights[0].data_ptr() % 32 == 0
        assert torch.equal(found.weights[0], w)


def test_fake_tensors_are_not_remembered(decided):
    with FakeTensorMode():
        x, w = torch.empty(6, 8), torch.empty(16, 8)
        target = torch.zeros(6, dtype=torch.long)
    head = Head((x,), (w,))
    call = call_of(head, Labels(target), (False,) * 4, Options(backend="torch"), log_probs=False)
    for times in (1, 2):
        planner.make_plan(planner.with_graph_facts(call))
        assert decided == times * ["engine", "plan"]
    assert not any(remembered._memories)


def test_no_tensor_is_kept(device):
    inputs = make_inputs(device=device, bias=True)
    fused(inputs).backward()
    kept = [weakref.ref(each) for each in (inputs.input, inputs.linear_weight, inputs.linear_bias)]
    assert any(remembered._memories)
    del inputs
    gc.collect()
    assert [each() for each in kept] == [None] * 3


def test_so_many_calls_are_remembered(device, monkeypatch, decided):
    """With more, the first ones are forgotten, and decided anew."""
    monkeypatch.setattr(remembered, "MOST_CALLS", 3)
    for N in (1, 2, 3, 4, 5):
        fused(make_inputs(N=N, device=device, ignored=0.0))
        assert all(0 < len(known) <= 3 for known in remembered._memories)
    decided.clear()
    fused(make_inputs(N=5, device=device, ignored=0.0))
    assert decided == []
    fused(make_inputs(N=1, device=device, ignored=0.0))
    assert decided == MADE


def test_threads_share_what_is_remembered(monkeypatch):
    monkeypatch.setattr(remembered, "MOST_CALLS", 2)
    w, found = torch.randn(16, 8), []

    def run(lengths):
        for N in lengths:
            x, target = torch.randn(N, 8), torch.randint(16, (N,))
            loss = lowtide.linear_cross_entropy(x, w, target)
            found.append((loss, torch.nn.functional.cross_entropy(x @ w.t(), target)))

    threads = [threading.Thread(target=run, args=([*range(1 + k, 9)] * 10,)) for k in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 10 * (8 + 7 + 6 + 5)
    for loss, expected in found:
        torch.testing.assert_close(loss, expected)
