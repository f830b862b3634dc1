"""A second term of few features, whose two products with the exponentials are made at once. That the loss and
its gradients are right with one is in test_exponentials_terms.py, too, where most terms are as narrow.

Shapes: N tokens, D features, V classes; C tokens of a chunk, R features of the second term.
"""

from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.loss import check, differentiate, make_inputs, workspace_for

pytest.importorskip("triton")


from lowtide.core.matmul import Operand
from lowtide.core.pending_gradient import PendingGradient
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options
from lowtide.ops.linear_cross_entropy.dispatch import cross_entropy
from lowtide.ops.linear_cross_entropy.engines.exponentials import low_rank_triton
from lowtide.ops.linear_cross_entropy.engines.exponentials.low_rank import LowRankTerm
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.accumulators import FloatSum
from lowtide.ops.linear_cross_entropy.planning import memory_model, planner, requirements
from lowtide.ops.linear_cross_entropy.planning.call import Call, Job, Wanted
from lowtide.ops.linear_cross_entropy.planning.sizes import choose_sizes
from tests.ops.linear_cross_entropy.on_exponentials import (
    dtype_on,
    everywhere,  # noqa: F401
    kept_plans,
    silent,  # noqa: F401
)
from tests.ops.linear_cross_entropy.test_several_terms import in_terms

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's NumPy


@pytest.fixture
def made(monkeypatch):
    return kept_plans(monkeypatch, few_tokens=True)


# The products.


def in_wider_rows(value, width):
    """Numbers beside it, and rows above and below, that are not to be read."""
    rows, columns = value.shape
    wide = torch.full((rows + 2, width), torch.nan, dtype=value.dtype, device=value.device)
    wide[1:-1, :columns] = value
    return wide[1:-1, :columns]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("R", [1, 5, 8, 16])
@pytest.mark.parametrize(("C", "V"), [(1, 1), (16, 32), (37, 139), (70, 1031)])
def test_whole_numbers_are_exact(device, C, V, R, add):
    """Sums of whole numbers are the same in any order; half of the exponentials are 0."""
    dtype = dtype_on(device)

    def whole(*shape, low=-8):
        return torch.randint(low, 9, shape, device=device).to(dtype)

    exp_CV, x_CR, weight_VR = whole(C, V, low=0), whole(C, R), whole(V, R)
    exp_CV[torch.rand(C, V, device=device) < 0.5] = 0
    sum_VR = whole(V, R).float()
    product_CR = torch.full((C, R), torch.nan, device=device)
    exact_CR, exact_VR = exp_CV.double() @ weight_VR.double(), exp_CV.double().t() @ x_CR.double()
    if add:
        exact_VR += sum_VR
    low_rank_triton.products(
        product_CR,
        sum_VR,
        in_wider_rows(exp_CV, -(-V // 8) * 8 + 8),
        in_wider_rows(x_CR, 2 * R),
        in_wider_rows(weight_VR, R + 24),
        add=add,
    )
    assert torch.equal(product_CR.double(), exact_CR)
    assert torch.equal(sum_VR.double(), exact_VR)


@pytest.mark.gpu
def test_at_the_size_of_a_chunk(device):
    """To float32's digits, and to the same bits every time."""
    if device == "cpu":
        pytest.skip("the card's own sizes")
    C, V, R = 2048, 128256, 16
    exp_CV = torch.rand(C, V, device=device).bfloat16()
    x_CR, weight_VR = (torch.randn(size, R, device=device).bfloat16() for size in (C, V))

    def found():
        product_CR = torch.empty(C, R, device=device)
        sum_VR = torch.empty(V, R, device=device)
        low_rank_triton.products(product_CR, sum_VR, exp_CV, x_CR, weight_VR, add=False)
        return product_CR, sum_VR

    for value, again, (a, b) in zip(found(), found(), ((exp_CV, weight_VR), (exp_CV.t(), x_CR))):
        assert torch.equal(value, again)
        exact, magnitude = a.double() @ b.double(), a.double() @ b.double().abs()
        assert ((value - exact).abs() <= 2**-14 * magnitude).all()


# The term.


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.2}, {"softcap": 3.0, "z_loss": 0.1, "logit_scale": 1.7}], ids=str
)
@pytest.mark.parametrize("whole", [True, False])
def test_in_chunks_and_pieces(device, made, whole, options, reduction):
    """Rows that are ignored, and a logit below all others' range, so that exponentials are 0."""
    N, D, R, V = (1100, 24, 16, 5008) if device == "cuda" else (75, 24, 8, 203)
    inputs = make_inputs(N, D + R, V, device=device, dtype=dtype_on(device), bias=True, class_weight=True)
    with torch.no_grad():
        inputs.linear_bias[::7] = -200.0
    workspace = None
    if not whole:
        hidden = {name: value for name, value in options.items() if name != "logit_scale"}
        workspace = 6 * V * R + workspace_for(  # of one term; the second has a sum of its own
            inputs,
            lambda plan: plan.rows >= N // 2 and plan.weight_gradient != "by_class",
            backend="triton",
            **hidden,
        )
    upstream = torch.randn(N, device=device) if reduction == "none" else -0.5
    options = {"reduction": reduction, **options}
    function = in_terms(cross_entropy, (D, R))
    found = differentiate(function, inputs, upstream, backend="triton", workspace=workspace, **options)
    check(found, inputs, upstream=upstream, **options)
    _, planned = made[0]
    assert (planned.rows == N) == whole
    assert 0 < planned.narrow_rows < planned.rows


@pytest.mark.parametrize(
    ("widths", "frozen", "wanted"),
    [
        ((24, 8), None, True),
        ((24, 16), None, False),
        ((24, 8), "input", False),
        ((24, 8), "linear_weight", False),
        ((8,), None, False),
    ],
)
def test_where_it_is(device, made, monkeypatch, widths, frozen, wanted):
    """Elsewhere the products are made one by one, and are as exact."""
    monkeypatch.setattr(memory_model, "NARROW", 8)
    inputs = make_inputs(D=sum(widths), V=101, device=device, dtype=dtype_on(device))
    if frozen is not None:
        getattr(inputs, frozen).requires_grad_(False)
    check(differentiate(in_terms(cross_entropy, widths), inputs, backend="triton"), inputs)
    assert {bool(each.narrow_rows) for _, each in made} == {wanted}


# Memory.


@pytest.fixture
def on_a_card(everywhere, monkeypatch):  # noqa: F811
    """With its sizes of everything."""
    monkeypatch.undo()
    monkeypatch.setattr(requirements, "_has_tensor_maps", lambda device: True)


def lora_call(N, features, V, mib):
    with FakeTensorMode():
        inputs, weights = (
            tuple(torch.empty(size, each, dtype=torch.bfloat16, device="cuda") for each in features)
            for size in (N, V)
        )
    every = (True,) * len(features)
    options = Options(compute_dtype=torch.bfloat16, workspace=mib << 20)
    head, job = Head(inputs, weights), Job(Wanted(every, every, False, False), False, None, False)
    return head, planner.told(head, options, job), job


@pytest.mark.parametrize("V", [203, 6000])
def test_what_it_holds_is_foretold(device, silent, made, V):  # noqa: F811
    """Beside its operands and the sum: what becomes a chunk's rows of dX, and what strips have of a piece."""
    N, D, R = 400, 24, 8
    inputs = make_inputs(N, D + R, V, device=device, dtype=dtype_on(device))
    differentiate(in_terms(cross_entropy, (D, R)), inputs, backend="triton")
    _, planned = made[-1]
    sum_VR = torch.empty(V, R, device=device)
    second = (part.detach()[:, D:] for part in (inputs.input, inputs.linear_weight))
    operand = Operand(*second, dtype_on(device), False, None)
    dx, sum = PendingGradient(torch.empty(N, R, device=device), None, None), FloatSum(sum_VR)
    term = LowRankTerm(operand, dx, sum, planned, None, place=1, smoothing=False)
    C, dtype = planned.rows, dtype_on(device)
    exp_CV, x_CR = (torch.empty(C, size, device=device, dtype=dtype)[:, :V] for size in (V + -V % 8, R))
    with peak_memory(device) as peak:
        term._add_product(sum, exp_CV, x_CR, first=True, last=True)
    foretold = 4 * R * (C + planned.narrow_rows * -(-V // memory_model.STRIP))
    assert foretold <= peak.bytes <= foretold + 512


@pytest.mark.parametrize("R", [8, 16])
@pytest.mark.parametrize("V", [1, 511, 32000, 256000])
def test_strips_lie_where_other_things_were(V, R, on_a_card):
    """Except for one row of them, which is counted by itself."""
    for N, D, mib in product((1, 130, 5000, 70000), (8, 512, 8192), (64, 300, 1024, 8192)):
        call = lora_call(N, (D, R), V, mib)
        _, workspace, counts = planner._memory(Call(*call))
        if workspace < counts.smallest_workspace:
            continue
        sizes = choose_sizes(workspace, counts)
        rows = sizes.narrow_rows
        assert counts.low_rank_bytes == -(-V // 512) * R * 4
        assert rows <= sizes.rows
        assert rows * counts.low_rank_bytes <= max(
            counts.low_rank_bytes, counts.shared_buffer_bytes(sizes.rows)
        )
        assert (rows == 0) == (sizes.weight_gradient == "by_class")


@pytest.mark.parametrize(
    ("N", "D", "V", "workspace", "rows", "narrow_rows"),
    [
        (16384, 4096, 128256, 3584, 8192, 2048),
        (16384, 4096, 128256, 1024, 2816, 1024),
        (8192, 2304, 256000, 1024, 1408, 384),
        (1024, 512, 151936, 128, 1024, 0),
    ],
)
def test_a_chunk_has_as_many_rows(N, D, V, workspace, rows, narrow_rows, on_a_card, monkeypatch):
    """As where the second term's products are made one by one; on a Hopper card, in so many MiB. The last has
    its weight's gradient formed class by class."""
    found = []
    for features in (0, 16):
        monkeypatch.setattr(memory_model, "NARROW", features)
        call = lora_call(N, (D, 16), V, workspace)
        found.append(planner.make_plan(*call))
        assert planner.peak_bytes(*call) <= workspace << 20
    assert [each.rows for each in found] == [rows, rows]
    assert [each.narrow_rows for each in found] == [0, narrow_rows]
