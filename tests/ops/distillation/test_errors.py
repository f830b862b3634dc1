"""What is refused, and how it is said."""

from dataclasses import replace

import pytest
import torch

from lowtide.ops.distillation import forward_kl, jensen_shannon
from tests.ops.distillation.helpers import fused, make_inputs

CHANGES = {
    "student_weight must have shape": lambda i: {"student_weight": i.student_weight.t()},
    "teacher_weight must have shape": lambda i: {"teacher_weight": i.teacher_weight[:, :-1]},
    "teacher_weight must have the student's 63 classes": lambda i: {"teacher_weight": i.teacher_weight[:-1]},
    r"teacher_input must have shape \[37, D\], with": lambda i: {"teacher_input": i.teacher_input[:-1]},
    "student_bias must have shape": lambda i: {"student_bias": torch.zeros(62)},
    "ignored must have shape": lambda i: {"ignored": i.ignored[:-1]},
    "ignored must be a bool tensor": lambda i: {"ignored": i.ignored.long()},
    "student_weight must have the dtype": lambda i: {"student_weight": i.student_weight.half()},
    "teacher_input must be float64": lambda i: {
        "teacher_input": i.teacher_input.double(),
        "teacher_weight": i.teacher_weight.double(),
    },
    "student_input must be a floating-point tensor": lambda i: {
        "student_input": i.student_input.detach().long()
    },
    "student_weight must be a torch.Tensor": lambda i: {"student_weight": i.student_weight.tolist()},
    "student_input must have shape": lambda i: {"student_input": torch.zeros(())},
    "student_weight must have at least one class": lambda i: {"student_weight": i.student_weight[:0]},
}
OPTIONS = [
    ({"reduction": "batchmean"}, "take 'sum' and divide"),
    ({"temperature": 0.0}, "temperature must be a finite number above 0"),
    ({"temperature": "2"}, "temperature must be a float"),
    ({"temperature": float("nan")}, "temperature must be a finite number above 0"),
    ({"temperature": 10**400}, "temperature must be a number that a float can hold"),
    ({"temperature": True}, "temperature must be a float, got True"),
    ({"temperature": torch.tensor(2.0)}, "temperature must be a float, got tensor"),
    ({"reduction": ["mean"]}, "reduction must be one of 'mean', 'sum', 'none', got"),
    ({"reduction": None}, "reduction must be one of 'mean', 'sum', 'none', got None"),
    ({"workspace": True}, "workspace must be a number of bytes"),
    ({"workspace": -1}, r": \d+ bytes in this call, got -1 bytes"),
    ({"student_softcap": 0.0}, "student_softcap must be a finite number above 0, or None for none, got 0.0"),
    ({"teacher_softcap": "30"}, "teacher_softcap must be a float, got '30'"),
    ({"workspace": 1.5}, "workspace must be a number of bytes"),
    ({"workspace": 0}, r": \d+ bytes in this call, got 0 bytes"),
]


@pytest.mark.parametrize("message", CHANGES)
def test_errors_of_tensors(message):
    inputs = make_inputs()
    heads = dict(inputs.items()) | CHANGES[message](inputs)
    with pytest.raises((ValueError, TypeError), match=message):
        jensen_shannon(**heads)


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_errors_of_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fused(make_inputs(), "forward", **options)


@pytest.mark.parametrize("beta", [0, 1, -0.1, 1.5, float("nan")])
def test_errors_of_beta_ends(beta):
    with pytest.raises(ValueError, match="call forward_kl"):
        jensen_shannon(**dict(make_inputs().items()), beta=beta)


def test_errors_of_devices():
    inputs = make_inputs()
    with pytest.raises(ValueError, match="teacher_weight must be on student_input's device"):
        fused(replace(inputs, teacher_weight=inputs.teacher_weight.to("meta")), "forward")


NONSENSE = (
    None,
    3,
    "x",
    [1.0],
    torch.nn.Linear(2, 3),
    torch.zeros(()),
    torch.zeros(0),
    torch.zeros(2, 0),
    torch.zeros(3, 4, 5),
    torch.zeros(37, 19, dtype=torch.complex64),
    torch.zeros(37, 19, dtype=torch.bool),
    torch.zeros(63, 19, device="meta"),
)


@pytest.mark.parametrize("place", range(len(NONSENSE)))
@pytest.mark.parametrize("name", dict(make_inputs(bias=True).items()))
def test_errors_of_nonsense(name, place):
    """And no KeyError, AttributeError or error of torch's own."""
    heads = dict(make_inputs(bias=True).items()) | {name: NONSENSE[place]}
    if NONSENSE[place] is None and ("bias" in name or name == "ignored"):
        assert forward_kl(**heads).isfinite()
        return
    with pytest.raises((ValueError, TypeError), match=" must ") as caught:
        forward_kl(**heads)
    assert isinstance(caught.value, RuntimeError)
    named = str(caught.value)
    assert "student" in named or "teacher" in named or "ignored" in named


def test_errors_of_workspace_for_higher_orders():
    """It is enough for the first order."""
    inputs = make_inputs(5, 4, 4096, 3)
    workspace = 300_000
    loss = fused(inputs, "forward", workspace=workspace)
    with pytest.raises(ValueError, match=r"workspace must hold one row of 4096 logits.*: 524288 bytes"):
        torch.autograd.grad(loss, inputs.student_input, create_graph=True)
    with pytest.raises(ValueError, match="higher order, forward mode or vmap"):
        torch.func.grad(lambda x: fused(replace(inputs, student_input=x), "forward", workspace=workspace))(
            inputs.student_input
        )
