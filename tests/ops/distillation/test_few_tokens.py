"""Few tokens of half-precision heads: the weight's gradient is one product, rounded when written.

On the CPU these run under Triton's interpreter, with products of bfloat16 as on a card: float32
sums.

Shapes: N rows, D features, V classes.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core import matmul
from lowtide.memory import peak_memory
from lowtide.ops.distillation import engine, planner
from lowtide.ops.distillation import heads as heads_module
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import in_torch
from tests.ops.distillation.helpers import DIVERGENCES, REDUCTIONS, dense, fused, make_inputs
from tests.support.loss import interpreted
from tests.support.operators import product_of_a_card

BF16, FP16 = torch.bfloat16, torch.float16
ROOM = 1 << 24  # for a single product; by default so small a call has no more than the dense one holds
# G, dW, and X where rows are ignored are rounded to half precision, each by 2^-9 at most (2^-12 in
# float16). The interpreter cuts a float32 off where a card rounds.
MOST_ERROR = {
    (BF16, "cuda"): 3 * 2**-9,
    (BF16, "cpu"): 9e-3,
    (FP16, "cuda"): 3 * 2**-12,
    (FP16, "cpu"): 1.2e-3,
}


@pytest.fixture
def as_on_a_card(device, monkeypatch):
    """Let the CPU multiply bfloat16 operands into float32 sums, and run the Triton pass."""
    monkeypatch.setattr(planner, "FEWEST_ROWS", 4)
    if device == "cuda":
        return
    pytest.importorskip("triton")
    if not interpreted():
        pytest.skip("needs Triton's interpreter")
    monkeypatch.setattr(planner, "choose_backend", lambda *_: "triton")
    monkeypatch.setattr(heads_module, "uses_units", lambda dtype, *_: dtype in (BF16, FP16))
    monkeypatch.setattr(planner, "_check_products", lambda *_: None)

    for module in (matmul, engine, in_torch):
        monkeypatch.setattr(module, "product", product_of_a_card)


def plan_of(N, D, V, *, dtype=BF16, workspace=None, device="cuda", ignored=False):
    """The plan of a forward call, and its bytes; on tensors without data."""
    with FakeTensorMode():
        student, teacher = (
            (*(torch.empty(rows, D, dtype=dtype, device=device) for rows in (N, V)), None) for _ in range(2)
        )
        mask = torch.empty(N, dtype=torch.bool, device=device) if ignored else None
        heads, wanted = Heads(*student, *teacher, mask), [True, True, False]
        student[0].requires_grad_(), student[1].requires_grad_()
        options = DistillationOptions(0.0, workspace=workspace).of(heads, None)
        options = options.with_graph_facts(heads, wanted)
        granted, counts, *_ = planner._memory(heads, options, wanted)
        return planner.make_plan(heads, options, wanted), granted, counts


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize(
    ("N", "D", "V"),
    [(16, 4096, 128256), (256, 1024, 32000), (256, 4096, 128256), (256, 896, 151936), (100, 5376, 262144)],
)
def test_few_tokens_need_no_blocks_of_classes(N, D, V, ignored, dtype):
    """The call holds G of the student, and may hold about what the dense computation does."""
    plan, granted, counts = plan_of(N, D, V, ignored=ignored, dtype=dtype)
    assert (plan.weight_gradient, plan.rows) == ("single_product", min(N, 128 if D < 1024 else N))
    assert counts.fixed + counts.single_product() <= granted
    assert granted <= 2 * N * V + 256 * (N + D + V) + (16 << 20) + (1 << 20)


@pytest.mark.parametrize(
    ("N", "D", "V", "way"),
    [
        (1024, 4096, 128256, "single_product"),
        (4096, 4096, 128256, "single_product"),
        (16384, 4096, 128256, "accumulate"),  # G of all tokens is larger than the workspace
        (8192, 512, 32000, "accumulate"),  # whose chunks have more rows than dW's memory has
        (1024, 128, 256000, "accumulate"),  # dW's memory holds 32 rows of both logits
    ],
)
def test_choice_by_sizes(N, D, V, way):
    assert plan_of(N, D, V)[0].weight_gradient == way


# Shapes that took 22 to 160 pieces in float16, and some of them in bfloat16, too (decision 0098).
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("N", "D", "V"),
    [(64, 2048, 32768), (64, 256, 100278), (64, 1024, 65024), (128, 1024, 50257), (121, 4096, 100278),
     (1024, 768, 6204), (128, 768, 128256), (137, 504, 168484), (1689, 2856, 3263)],
)  # fmt: skip
def test_few_tokens_take_few_chunks(N, D, V, dtype):
    """One, mostly, where it takes at most 64 MiB more than the dense computation."""
    plan, granted, counts = plan_of(N, D, V, dtype=dtype)
    assert plan.weight_gradient == "single_product"
    assert -(-N // plan.rows) <= (2 if D in (504, 2856) else 1)
    dense = max(8 * N * V - 2 * (N + V) * D, 2 * N * V)
    assert counts.one_chunk <= granted <= dense + (64 << 20) + 256 * (N + D + V)


def test_logits_of_their_own_where_the_gradient_has_no_room_for_them():
    """Only where the call has room for them; else several chunks lie in the gradient's memory."""
    (_, _, own), (plan, _, placed) = plan_of(256, 512, 50264), plan_of(256, 512, 50264, workspace=60 << 20)
    assert own.one_product_row > 8 * 50264 > placed.one_product_row
    assert (plan.weight_gradient, plan.rows) == ("single_product", 96)
    assert placed.one_chunk <= 60 << 20


def test_other_dtypes_have_none():
    """A float32 gradient is its own sum."""
    assert plan_of(64, 1024, 32000, dtype=torch.float32)[0].weight_gradient != "single_product"


def test_small_workspace_has_none():
    assert plan_of(64, 1024, 32000, workspace=2 << 20)[0].weight_gradient == "class_blocks"


def relative(actual, exact):
    return float((actual.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(
    ("N", "D", "V", "chunks", "dtype"),
    [(1, 32, 40, 1, BF16), (24, 32, 144, 3, BF16), (20, 33, 203, 3, BF16), (24, 32, 144, 1, BF16),
     (24, 32, 144, 3, FP16), (21, 33, 203, 1, FP16)],
)  # fmt: skip
@pytest.mark.parametrize("ignored", [0, 0.25])
def test_gradients(device, as_on_a_card, monkeypatch, divergence, reduction, N, D, V, chunks, dtype, ignored):
    """Gradients are exact from one chunk of logits and from several; ignored rows may be NaN."""
    torch.manual_seed(N + V)
    if chunks == 1:  # with logits of its own
        monkeypatch.setattr(planner, "counted_as", lambda device: "cuda")
    inputs = make_inputs(N, D, V, 16, device=device, dtype=dtype, bias=V > 200, ignored=ignored)
    if ignored:
        assert inputs.ignored is not None
        inputs.ignored[0] = N > 1
        with torch.no_grad():
            inputs.student_input[inputs.ignored] = torch.nan
    seen = []
    own = planner.make_plan
    options = {"temperature": 1.3, "student_softcap": 9.0, "workspace": ROOM, "reduction": reduction}

    def remembered(*arguments):
        seen.append(own(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.ops.distillation.ops.make_plan", remembered)
        loss = fused(inputs, divergence, **options)
        upstream = torch.linspace(0.5, 1.5, max(1, loss.numel()), device=device).view(loss.shape)
        leaves = inputs.leaves()
        found = torch.autograd.grad(loss, tuple(leaves.values()), upstream)
    assert seen[-1].weight_gradient == "single_product"
    if device == "cpu":
        assert -(-N // seen[-1].rows) == chunks

    wide = inputs.to(torch.float64)
    if ignored:
        with torch.no_grad():
            wide.student_input[wide.ignored] = 0
    true = dense(wide, divergence, **options)
    exact = torch.autograd.grad(true, tuple(wide.leaves().values()), upstream.double())
    assert relative(loss.detach(), true.detach()) < 2e-6
    for name, got, wanted in zip(leaves, found, exact):
        if wanted.norm() == 0:
            assert not got.any(), name
        else:
            assert relative(got, wanted) < MOST_ERROR[dtype, device], name
    if ignored:
        assert not found[0][inputs.ignored].any()


def test_factor_of_a_mean_rounds_nothing(device, as_on_a_card):
    """The host knows the whole factor, so X is multiplied by 1: dW errs by G and itself."""
    torch.manual_seed(3)
    inputs = make_inputs(21, 32, 144, 16, device=device, dtype=BF16, ignored=0)
    kept = []
    add = in_torch.SingleProduct.add_product

    def remembered(self, g_CV, x_CD, **options):
        add(self, g_CV, x_CD, **options)
        kept.append((self.x_ND[self.kept - x_CD.shape[0] : self.kept], x_CD))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_torch.SingleProduct, "add_product", remembered)
        fused(inputs, "forward", temperature=1.7, workspace=ROOM).backward()
    assert kept
    assert all(torch.equal(*pair) for pair in kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(("N", "D", "V"), [(16, 1024, 32000), (256, 1024, 32000), (300, 384, 50257)])
def test_memory_kept(N, D, V, reduction):
    inputs = make_inputs(N, D, V, D, device="cuda", dtype=BF16, ignored=0)
    _, granted, _ = plan_of(N, D, V)
    fused(inputs, "forward", reduction=reduction).sum().backward()  # libraries are loaded
    for leaf in inputs.leaves().values():
        leaf.grad = None
    gradients = sum(leaf.nbytes for leaf in inputs.leaves().values())
    with peak_memory("cuda") as peak:
        fused(inputs, "forward", reduction=reduction).sum().backward()
    # The allocator leaves up to 1 MiB at the end of a segment to the tensor before it.
    assert peak.bytes <= granted + gradients + 4 * N + (1 << 20)
