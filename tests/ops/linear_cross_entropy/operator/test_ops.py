"""The registered operators by themselves: what torch asks of one, and FLOPs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.engines.saved_stats import with_engine
from lowtide.ops.linear_cross_entropy.operator.fake import with_new_graph_facts
from tests.support.loss import fused, fused_log_probs, make_inputs

OPS = torch.ops.lowtide
WANTED = [(True, True, True, True), (True, False, False, False), (False, True, False, False), (False,) * 4]


def operands(device, **made):
    inputs = make_inputs(device=device, bias=True, logit_scale=True, **made)
    tensors = [leaf.detach() for leaf in (inputs.linear_bias, inputs.logit_scale)]
    return [[inputs.input.detach()], [inputs.linear_weight.detach()], *tensors, inputs.target]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_opcheck_loss(device, reduction, probabilities, wanted):
    head = operands(device, probabilities=probabilities)
    options = Options(reduction=reduction, softcap=3.0, z_loss=0.1)
    call = with_new_graph_facts("lowtide::linear_cross_entropy", (*head, None, None, None, wanted, *options))
    torch.library.opcheck(OPS.linear_cross_entropy.default, call)
    if reduction == "none":
        loss_N, *statistics = OPS.linear_cross_entropy(*call)
        upstream_N = torch.randn_like(loss_N)
        arguments = (upstream_N, statistics, *call)
        torch.library.opcheck(OPS.linear_cross_entropy_backward.default, arguments)


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_opcheck_log_probs(device, wanted):
    head, options = operands(device), Options(softcap=3.0)
    call = with_new_graph_facts("lowtide::linear_log_probs", (*head, wanted, *options))
    torch.library.opcheck(OPS.linear_log_probs.default, call)
    log_prob_N, _, _, _, *statistics = OPS.linear_log_probs(*call)
    upstream_N = torch.randn_like(log_prob_N)
    for upstream in ((upstream_N, None, None), (None, upstream_N, upstream_N)):
        arguments = (*upstream, statistics, *call)
        torch.library.opcheck(OPS.linear_log_probs_backward.default, arguments)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("exponentials", "cannot run here: .*; compile or export it here"),
        ("soft_targets", "cannot run here: .*; compile or export it here"),
        ("", "engine must be one of"),
    ],
)
def test_foreign_graph_engine_unsupported(engine, reason):
    """Neither forward nor backward takes another: their statistics would mean something else."""
    head, options = operands("cpu"), Options(reduction="none", backend="torch")
    call = with_new_graph_facts(
        "lowtide::linear_cross_entropy", (*head, None, None, None, (True,) * 4, *options)
    )
    _, *statistics = OPS.linear_cross_entropy(*call)
    wrong = list(call)
    wrong[-len(options) + Options._fields.index("engine")] = engine
    with pytest.raises(ValueError, match=reason):
        OPS.linear_cross_entropy(*wrong)
    if engine:
        foreign = [with_engine(statistics[0].flatten(), engine), *statistics[1:]]
        with pytest.raises(ValueError, match=reason):
            OPS.linear_cross_entropy_backward(torch.ones(37), foreign, *call)


def test_flops(device):
    """In products of tokens, features and classes: the logits, and one for each gradient."""
    inputs = make_inputs(37, 19, 63, device=device)
    frozen = make_inputs(37, 19, 63, device=device)
    frozen.linear_weight.requires_grad_(False)

    def products(step):
        with FlopCounterMode(display=False) as counter:
            step()
        return counter.get_total_flops() / (2 * 37 * 19 * 63)

    assert products(lambda: fused(inputs).backward()) == 3
    assert products(lambda: fused(frozen).backward()) == 2
    assert products(lambda: fused(inputs, reduction="none").sum().backward()) == 4
    assert products(lambda: fused_log_probs(inputs).entropy.sum().backward()) == 4
    with torch.no_grad():
        assert products(lambda: fused(inputs)) == 1


@pytest.mark.parametrize("scale", [1.0, 10.0, 30.0])
def test_entropy_gradient_digits(device, scale):
    """E[z] - z from the statistics, not from the difference of a log-sum-exp and an entropy."""
    torch.manual_seed(0)
    x = (torch.randn(50, 8) * scale).to(device).requires_grad_()
    w, target = torch.randn(100, 8, device=device), torch.zeros(50, dtype=torch.long, device=device)
    from lowtide import linear_log_probs

    (ours,) = torch.autograd.grad(linear_log_probs(x, w, target).entropy.sum(), x)

    def dense(dtype):
        leaf = x.detach().to(dtype).requires_grad_()
        log_p = (leaf @ w.to(dtype).t()).log_softmax(1)
        return torch.autograd.grad(-(log_p.exp() * log_p).sum(), leaf)[0].double()

    exact = dense(torch.float64)
    assert (ours.double() - exact).norm() <= 2 * (dense(torch.float32) - exact).norm()
