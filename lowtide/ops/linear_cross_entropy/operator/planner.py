"""Make the plan of a call from shapes, dtypes and the device, never from the values of tensors."""

from dataclasses import replace
from typing import NamedTuple

import torch

from lowtide.ops.linear_cross_entropy.definition.head import Head
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials import spec as cpu_exponentials
from lowtide.ops.linear_cross_entropy.engines.exponentials import spec as exponentials
from lowtide.ops.linear_cross_entropy.engines.logits import spec as logits
from lowtide.ops.linear_cross_entropy.engines.soft_targets import spec as soft_targets
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.call import CPU_UNITS, Call
from lowtide.ops.linear_cross_entropy.planning.call_memory import dense_workspace, may_depend_on_tokens
from lowtide.ops.linear_cross_entropy.planning.division import sizes
from lowtide.ops.linear_cross_entropy.planning.division.step_time import (
    few_tokens_seconds,
    step_seconds,
    weight_gradient_seconds,
)
from lowtide.ops.linear_cross_entropy.planning.division.workspace import granted_bytes, with_logits_placed
from lowtide.ops.linear_cross_entropy.planning.memory_model import with_shard
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess, operand_access, unreadable
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.planning.remembered import remembered
from lowtide.ops.linear_cross_entropy.planning.requirements import check_engine, choose_backend
from lowtide.ops.linear_cross_entropy.planning.tiling import WeightGradient
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import (
    FEWEST_CLASSES_PER_TOKEN,
    choose_weight_gradient,
)

# With fewer classes per token, the engine of logits, which is less exact there, runs only where
# exponentials would form dW by class blocks.
CLASSES_PER_TOKEN = 16  # decisions 0016 and 0074

# A GEMM that forms dX has fewer rows, but at least so many, where its result would take more than
# 1/40 of the workspace, unless one chunk of few tokens fits beside it. Fewer rows are a little
# slower, and more rows per chunk gain more.
PRODUCT_PART, FEWEST_ROWS_OF_PART = 40, 1024  # decisions 0032 and 0076


# In order of preference.
SPECS = {
    "soft_targets": soft_targets.SPEC,
    "exponentials": exponentials.SPEC,
    "cpu_exponentials": cpu_exponentials.SPEC,
    "logits_triton": logits.TRITON,
    "cpu_logits": logits.CPU,
    "logits_torch": logits.TORCH,
}


class Choice(NamedTuple):
    """Hold the facts that a compiled graph is specialised on, which forward and backward share."""

    engine: str
    few_tokens: bool
    dense: int | None
    """The memory of the dense computation."""
    reasons: dict[str, str]
    """Why none of the engines that are preferred to this one runs the call."""


@remembered
def choose_engine(call: Call) -> Choice:
    """Choose by layouts, dtypes and the device.

    This happens once per call, because each engine saves row statistics of its own.
    """
    head, options = call.head, call.options
    backend = choose_backend(options.backend, head.device, options.compute_dtype)
    layout = call._replace(head=head.first_position) if head.by_position else call
    reasons: dict[str, str] = {}
    for engine, spec in SPECS.items():
        reason = spec.unsupported_reason(layout, backend)
        if options.sharded and spec.shard_token_bytes is None:
            reason = "it takes only a head whose classes are not divided over ranks or into segments"
        if reason is None:
            break
        reasons[engine] = reason
    chosen = Choice(engine, few_tokens(head, engine), dense_workspace(call), reasons)
    slower = _slower_than_logits(call, chosen) if engine == "exponentials" else None
    if slower is None:
        return chosen
    return chosen._replace(engine="logits_triton", reasons=reasons | {engine: slower})


def _slower_than_logits(call: Call, chosen: Choice) -> str | None:
    """Return why the engine of float32 logits runs a call of few tokens in place of exponentials.

    That engine must form dW by a single GEMM, too (logits/one_product.py), which it never does for
    a divided head. Its ranks choose by what all of them know, and have tokens and classes of their
    own. With few classes per token its dW is less exact, because it rounds the gradient of a
    target's logit, about -1, to bfloat16. So there it runs only in place of class blocks. The same
    holds where a bias needs a gradient, or logits/one_product.py does not compute the call.
    """
    head, options = call.head, call.options
    if options.sharded or head.by_position or not may_depend_on_tokens(head.tokens) or not head.tokens:
        return None
    facts = options._replace(few_tokens=chosen.few_tokens, dense=chosen.dense)
    of_logits, of_exponentials = (
        _few_tokens_seconds(call._replace(options=facts._replace(engine=engine)))
        for engine in ("logits_triton", "exponentials")
    )
    if of_logits is None or of_exponentials is None or of_exponentials <= of_logits:
        return None
    return f"predicted {1e3 * of_exponentials:.2f} ms, where float32 logits take {1e3 * of_logits:.2f}"


def _few_tokens_seconds(call: Call) -> float | None:
    """Return the predicted seconds of a call; None if the engine's way is not to be compared.

    The engine of logits must form dW by a single GEMM. Where it is not to run in place of another
    way, exponentials must form dW by class blocks.
    """
    engine = call.options.engine
    access, workspace, counts = _memory(call)
    if workspace < counts.smallest_workspace:
        return None
    counts = replace(counts, may_skip=False)
    tiling = sizes.choose_sizes(workspace, counts)
    way, many = tiling.weight_gradient, counts.N * CLASSES_PER_TOKEN > counts.V
    instead = many or call.needs_grad.bias or not logits.has_one_product(call, access)
    if engine == "logits_triton" and way != "single_product":
        return None
    if engine == "exponentials" and instead and way != "class_blocks":
        return None
    chunks = logits.chunks_in_gradient(counts.N, counts.D, counts.V, counts.device)
    return few_tokens_seconds(engine, counts, tiling, chunks)


def with_graph_facts(call: Call) -> Call:
    """Return the call, whose options have the facts that a compiled graph is specialised on."""
    choice = choose_engine(call)
    options = call.options._replace(  # decision 0014
        few_tokens=choice.few_tokens, engine=choice.engine, dense=choice.dense
    )
    return Call(call.head, options, call.call_kind)


def few_tokens(head: Head, engine: str) -> bool:
    """Return True if a single GEMM over all tokens may form a weight gradient.

    In engines that use a CPU's units it may wherever one chunk has room for the tokens.
    """
    if not may_depend_on_tokens(head.tokens):
        return False
    return engine in CPU_UNITS or head.tokens * FEWEST_CLASSES_PER_TOKEN <= head.classes


def readable(call: Call) -> Call:
    """Copy each operand whose layout the engine cannot read; raise if it cannot run here."""
    return call._replace(head=with_copies(call.head, unreadable_operands(call)))


def with_copies(head: Head, copied: tuple[bool, ...]) -> Head:
    """Copy those inputs, then weights, that are marked."""
    if not any(copied):
        return head
    operands = [
        each.clone(memory_format=torch.contiguous_format) if copy else each
        for each, copy in zip((*head.inputs, *head.weights), copied)
    ]
    return head.of([*operands, head.bias, head.scale])


@remembered
def unreadable_operands(call: Call) -> tuple[bool, ...]:
    """Return for each input, then each weight, True if the engine cannot read it."""
    check_engine(call.options, call.head.device)
    return unreadable(call.head, call.options)


@remembered
def make_plan(call: Call) -> Plan:
    """Return the plan of a call whose engine is chosen."""
    access, workspace, counts = _memory(call)
    tiling = sizes.choose_sizes(workspace, counts)
    single = call.options.engine == "logits_triton" and tiling.weight_gradient == "single_product"
    return Plan(
        options=call.options,
        call_kind=call.call_kind,
        workspace=workspace,
        access=access,
        one_product_of_logits=single and logits.has_one_product(call, access),
        **vars(tiling),
    )


def rows_for(call: Call, rank_tokens: int) -> int:
    """Return the rows per chunk that this rank would take if each rank had so many tokens."""
    call = call._replace(rank_tokens=rank_tokens)
    if call.options.dense is not None:
        call = call._replace(options=call.options._replace(dense=dense_workspace(call)))
    _, workspace, counts = _memory(call)
    return sizes.choose_sizes(workspace, counts).rows


def weight_gradient_of(call: Call) -> WeightGradient:
    """Return the way to form the first weight gradient; by "accumulate" it is kept as a sum.

    The shapes and dtypes of the operator's outputs depend on nothing else of the plan.
    """
    _, workspace, counts = _memory(call)
    return choose_weight_gradient(workspace, counts)


def peak_bytes(call: Call) -> int:
    """Return the bytes that a call takes beyond its arguments and results.

    These are part of the workspace and, under autocast on CUDA, the copies of the weights.
    """
    access, workspace, counts = _memory(call)
    cast = [each for each in call.head.weights if each.is_cuda and each.dtype != access.dtype]
    copies = sum(each.numel() * access.dtype.itemsize for each in cast)
    return copies + sizes.tiling_bytes(counts, sizes.choose_sizes(workspace, counts))


def predicted_seconds(call: Call, ignored: float = 0.0) -> float | None:
    """Return the predicted seconds of loss and gradients on an H200; None if no model knows it.

    The model knows the exponentials engine, with one input that gets a gradient. `ignored` is the
    share of ignored rows; it counts where these are skipped.
    """
    head = call.head
    if call.options.engine != "exponentials" or len(head.inputs) > 1 or head.device.type != "cuda":
        return None
    if not call.needs_grad.inputs[0]:
        return None
    _, workspace, counts = _memory(call)
    tiling = sizes.choose_sizes(workspace, counts)
    if not tiling.skips_ignored:
        return step_seconds(counts, tiling)
    counted = replace(counts.of_skipping(), N=max(1, round(counts.N * (1 - ignored))))
    seconds = step_seconds(counted, tiling)
    if tiling.weight_gradient == "accumulate":  # cuBLAS forms dW, and reads all rows
        seconds += weight_gradient_seconds(counts, tiling) - weight_gradient_seconds(counted, tiling)
    return seconds


def _memory(call: Call) -> tuple[OperandAccess, int, ByteCounts]:
    """Return how operands are read, the workspace in bytes, and the bytes of each part."""
    access = operand_access(call)
    spec, options = SPECS[call.options.engine], call.options
    counts = spec.memory(call, access)
    if options.sharded:
        assert spec.shard_token_bytes is not None
        token_bytes = spec.shard_token_bytes(call, counts)
        counts = with_shard(counts, options.shard, options.sum_dtype, call.features, token_bytes)
    # A rank of a divided head holds all rows of dX in float32, and as many bytes again. For a
    # single GEMM of dW any other call may hold a scaled copy of X, if tokens are few.
    scales = counts.one_product_row and 2 * counts.N <= counts.V
    of_number = 8 if options.sharded else access.dtype.itemsize if scales else 0
    rows = of_number * counts.N * counts.D
    counts = with_logits_placed(counts, options.workspace, options.dense, rows=rows)
    workspace = granted_bytes(options.workspace, options.dense, counts, rows=rows)
    usual = counts if options.few_tokens else replace(counts, product_rows=_usual_rows(counts, workspace))
    if options.dense is not None:  # else the number of tokens may be a symbol
        fitted = usual.with_smaller_products(workspace - (counts.one_chunk_and_sum - counts.one_chunk))
        if fitted.one_chunk_and_sum <= workspace:
            return access, workspace, fitted
    if options.few_tokens:
        fitted = counts.with_smaller_products(workspace)
        if fitted.one_chunk <= workspace:
            return access, workspace, fitted
    return access, workspace, replace(counts, product_rows=_usual_rows(counts, workspace))


def _usual_rows(counts: ByteCounts, workspace: int) -> int:
    """Return the rows of a GEMM that forms dX where not all tokens are one chunk."""
    rows = counts.product_rows
    fewest = min(FEWEST_ROWS_OF_PART, rows // 2)
    while rows > fewest and PRODUCT_PART * rows * counts.product > workspace:
        rows //= 2
    return rows
