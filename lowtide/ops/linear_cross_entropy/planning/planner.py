"""Decide once: all that follows from shapes, dtypes and the device, and never from the values of tensors.

Shapes: N tokens, D features (of the first linear term; D_k of term k), V classes.
"""

from dataclasses import dataclass, replace

import torch

from lowtide.core import backend as hopper
from lowtide.core.matmul import PRODUCT_ROWS, copied_bytes
from lowtide.core.strides import multiplies
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options
from lowtide.ops.linear_cross_entropy.planning.call_memory import dense_workspace, tokens_decide
from lowtide.ops.linear_cross_entropy.planning.chunking import (
    ENOUGH_ROWS,
    MOST_BYTES,
    NARROW,
    ROW_TILE,
    STRIP,
    TARGETS,
    Needs,
    Sizes,
    WeightGradient,
    granted,
    spend,
    spent,
    weight_gradient,
)
from lowtide.ops.linear_cross_entropy.planning.class_blocks import ClassBlocks
from lowtide.ops.linear_cross_entropy.planning.requirements import (
    Job,
    Route,
    Wanted,
    backend_of,
    choose_engine,
    route_of,
)

# One product for all tokens forms the rows of their targets again: for so many classes a token it pays.
CLASSES_PER_TOKEN = 16  # decision 0016

# Where a product that becomes dX would take more than a fortieth of the workspace, it has half as many rows,
# which are hardly slower: more rows to a chunk are worth more.
PRODUCT_PART = 40  # decision 0032


@dataclass(frozen=True, slots=True)
class Plan:
    options: Options
    job: Job
    workspace: int
    """Bytes that the call may hold beside inputs, outputs and gradients."""
    compute_dtype: torch.dtype
    """Operands of the products: that of the options, but float32 for half precision on the CPU, where the
    engine is not that of cpu_engine.py."""
    copies_rows: tuple[bool, ...]
    """Of each term, whether a chunk of the input must be copied, for its dtype or its strides."""
    scales_in_gradient: tuple[bool, ...]
    """Of each term, whether there is room for a chunk's rows, scaled for dW's product, where those of dX will
    be (linear_term.py)."""
    rows: int
    """Tokens per chunk."""
    chunk_classes: int
    """Classes of a chunk at a time; V, but on the path without a pass ("by_class")."""
    operand_classes: int
    """Classes whose weight rows are copied at a time; V where no copy is needed."""
    product_rows: int
    """Tokens of a chunk whose products become dX at a time, on the path without a pass; all, where classes
    come in blocks ("by_class")."""
    narrow_rows: int
    """Tokens of a chunk whose two products with a second term are made at once, at a time (low_rank.py);
    0 where they are made one by one."""
    weight_gradient: WeightGradient
    """Of the first term; the others' are accumulated."""
    sum_bits: int
    """Of a sum that lies in part in the gradient's memory ("split"), on CUDA."""
    block_rows: int
    """Tokens per tile of a class block ("by_class")."""
    block_classes: int
    """Classes per block ("by_class")."""

    @property
    def wanted(self) -> Wanted:
        return self.job.wanted

    @property
    def engine(self) -> str:
        return self.options.engine

    @property
    def backend(self) -> str:
        return backend_of(self.engine)

    @property
    def exponentials(self) -> bool:
        return self.engine == "exponentials"

    @property
    def distances(self) -> bool:
        return self.engine == "distances"

    @property
    def cpu_exponentials(self) -> bool:
        return self.engine == "cpu_exponentials"

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of logits, statistics and accumulators: float32, or float64 for float64."""
        return self.options.sum_dtype


def make_plan(head: Head, options: Options, job: Job) -> Plan:
    route = route_of(head, options)
    workspace, needs = _needs(head, options, job, route)
    sizes = spend(workspace, needs)
    return Plan(
        options=options,
        job=job,
        workspace=workspace,
        compute_dtype=route.compute_dtype,
        copies_rows=route.copies_rows,
        scales_in_gradient=_scales_in_gradient(head, job, route),
        rows=sizes.rows,
        chunk_classes=sizes.chunk_classes,
        operand_classes=sizes.operand_classes,
        product_rows=sizes.product_rows,
        narrow_rows=_narrow_rows(needs, sizes),
        weight_gradient=sizes.weight_gradient,
        sum_bits=sizes.sum_bits,
        block_rows=sizes.block_rows,
        block_classes=sizes.block_classes,
    )


def told(head: Head, options: Options, job: Job) -> Options:
    """Return the options with what the caller decides for forward and backward, and a graph keeps."""
    layout = head.first_position if head.by_position else head
    engine = choose_engine(layout, options, job).engine
    dense = dense_workspace(head, options, job.wanted.all)
    return options._replace(few_tokens=few_tokens(head), engine=engine, dense=dense)  # decision 0014


def few_tokens(head: Head) -> bool:
    """Whether one product for all tokens may be a weight's gradient."""
    return tokens_decide(head.tokens) and head.tokens * CLASSES_PER_TOKEN <= head.classes


def keeps_sum(head: Head, options: Options, job: Job) -> bool:
    """Whether the first weight's gradient is kept as a sum until backward: all that the shapes and dtypes of
    the outputs depend on, and as little as possible of N, which may be symbolic."""
    return weight_gradient(*_needs(head, options, job, route_of(head, options))) == "accumulate"


def held(head: Head, options: Options, job: Job) -> int:
    """Bytes that a call takes beside what it is given and returns: of the workspace, and under autocast on
    CUDA for its copies of the weights."""
    route = route_of(head, options)
    workspace, needs = _needs(head, options, job, route)
    cast = [each for each in head.weights if each.is_cuda and each.dtype != route.compute_dtype]
    copies = sum(each.numel() * route.compute_dtype.itemsize for each in cast)
    return copies + spent(needs, spend(workspace, needs))


def _scales_in_gradient(head: Head, job: Job, route: Route) -> tuple[bool, ...]:
    return tuple(
        grad and input.dtype.itemsize >= route.compute_dtype.itemsize
        for input, grad in zip(head.inputs, job.wanted.inputs)
    )


def _of_strips(head: Head, options: Options, job: Job, route: Route) -> int:
    """Bytes of a token; 0 without a narrow term, or where not both of its gradients are wanted."""
    if not route.exponentials or [*zip(job.wanted.inputs, job.wanted.weights)][1:] != [(True, True)]:
        return 0
    R = head.inputs[1].shape[-1]
    return -(-head.classes // STRIP) * R * options.sum_dtype.itemsize if R <= NARROW else 0


def _narrow_rows(needs: Needs, sizes: Sizes) -> int:
    if not needs.of_strips or sizes.weight_gradient == "by_class":
        return 0
    most, tile = needs.in_turn(sizes.rows) // needs.of_strips, ROW_TILE[needs.device]
    if most >= sizes.rows:
        return sizes.rows
    return max(1, most - most % tile if most > tile else most)


def _needs(head: Head, options: Options, job: Job, route: Route) -> tuple[int, Needs]:
    """The workspace, and what takes how much of it."""
    wanted, sum_dtype, device = job.wanted, options.sum_dtype, head.device.type
    N, V, D = head.tokens, head.classes, head.inputs[0].shape[-1]
    features = [input.shape[-1] for input in head.inputs]
    sum_size, operand_size = sum_dtype.itemsize, route.compute_dtype.itemsize
    # On CUDA another dtype means autocast, and one copy of the whole weight: not the workspace's.
    weight = head.weights[0]
    copies_weight = (weight.dtype != route.compute_dtype and device == "cpu") or not multiplies(weight)

    # Only a kernel rounds in place; here it does so before a logit is stored.
    rounds_apart = route.backend == "torch" and route.compute_dtype != sum_dtype
    logit = sum_size + (operand_size if rounds_apart else 0)
    if route.cpu_exponentials:
        logit = operand_size
    found = product = 0
    keeps_exponentials = route.exponentials and wanted.some
    if route.exponentials:  # a bfloat16 number, and float32 sums for every 128 classes
        logits = (V + 8) * operand_size if keeps_exponentials else 0
        found = V // 32 * _sums(options, job)
    elif route.distances:  # likewise, and four sums for every 128 (the interpreter's tiles are smaller)
        logits = V // 8 + 2048 + ((V + 8) * operand_size if wanted.some else 0)
    elif route.cpu_exponentials:
        logits = V * logit if wanted.some else 0
    else:
        logits = V * (logit if wanted.some else sum_size)
        if route.backend == "torch":
            logits += V * sum_size * _copies(options, job)
    row = logits + 24 * sum_size  # and statistics
    gathered = 0
    for k, D_k in enumerate(features):
        if route.copies_rows[k]:
            of_row, at_once = copied_bytes(head.inputs[k], route.compute_dtype)
            row, gathered = row + of_row, max(gathered, at_once)
        if route.cpu_exponentials:  # targets' rows of the weight, and what they are multiplied with
            row += (2 * sum_size + operand_size) * D_k
        if not route.exponentials:
            row += wanted.inputs[k] * sum_size * D_k
            continue
        product = max(product, wanted.inputs[k] * sum_size * D_k)
        if wanted.weights[k] and not _scales_in_gradient(head, job, route)[k]:
            row += D_k * operand_size
    of_strips = _of_strips(head, options, job, route)
    if of_strips:  # and, as long as the chunk lasts, what becomes its rows of dX
        row += features[1] * sum_size
    # The bias, its gradient, and a chunk's share of that.
    of_bias = 11 if route.exponentials else 6 if route.cpu_exponentials else 3
    vectors = (of_bias * int(head.bias is not None) + int(job.class_weights)) * V * sum_size
    # A CUDA allocation is a multiple of 512 bytes, and some eighty vectors and numbers are small.
    fixed = (
        ((160 if route.exponentials else 64) + 16 * sum_size) * N
        + vectors
        + of_strips
        + gathered
        + (65536 if device == "cuda" else 8192)
    )
    weight_sum = narrow = 0
    for k, (weight, grad) in enumerate(zip(head.weights, wanted.weights)):
        size = V * features[k] * sum_size if grad and weight.dtype != sum_dtype else 0
        if k == 0:
            weight_sum = size
        else:  # small, and summed in any case
            copied = weight.dtype != route.compute_dtype or not multiplies(weight)
            narrow += size + (V * features[k] * operand_size if copied else 0)
    fixed += narrow
    # What a sum in the gradient's memory takes beside it: a byte for each weight, or half of one, where there
    # are tensor maps (packed_triton.py), else, on the CPU, half of itself (in_place.py).
    split_sum = split_sum_20 = at_once = 0
    if (route.exponentials or route.distances) and head.weights[0].dtype == torch.bfloat16:
        split_sum, split_sum_20 = min(weight_sum, V * D), min(weight_sum, V * D // 2)
        # Not with label smoothing, which adds to every row.
        if route.exponentials and options.few_tokens and not options.label_smoothing:
            at_once = TARGETS * (N * operand_size + D * sum_size)
    elif device == "cpu" and head.weights[0].dtype.itemsize * 2 == sum_size:
        split_sum = min(weight_sum, (V - V // 2) * D * sum_size)
    by_class = None
    if route.exponentials and weight_sum:
        fixed += 4 * V  # where the rows of its targets are
        copies = sum(D_k * operand_size * copied for D_k, copied in zip(features, route.copies_rows))
        by_class = ClassBlocks(
            N=N,
            D=D,
            V=V,
            step=ROW_TILE[device],
            exponential=operand_size,
            found=sum_size * (1 + wanted.scale),
            statistics=V // 32 * _sums(options, job),
            largest=(V // ROW_TILE[device] + 4) * sum_size,
            row=24 * sum_size
            + copies
            + sum(D_k * sum_size * wanted for D_k, wanted in zip(features, wanted.inputs)),
            gradient_row=copies + 40 * wanted.bias,  # ones, to add up with
            class_sum=D * sum_size + 64 * wanted.bias,
        )
    maps_sum = split_sum_20 > 0 and D % 16 == 0  # as a tensor map of its lower bits wants
    pipelined = maps_sum and hopper.pipelines_on(head.device) and hopper.worth(V, D, ENOUGH_ROWS)
    needs = Needs(
        N=N,
        D=D,
        V=V,
        device=device,
        fixed=fixed,
        row=row,
        found=found,
        product=product,
        of_strips=of_strips,
        product_rows=PRODUCT_ROWS,
        longest=max(ENOUGH_ROWS, MOST_BYTES // (V * operand_size)) if keeps_exponentials else 0,
        pipelined=pipelined,
        weight_sum=weight_sum,
        split_sum=split_sum,
        split_sum_20=split_sum_20,
        at_once=at_once,
        weight_copy=D * operand_size if copies_weight else 0,
        class_sum=D * sum_size,
        block_logit=logit + (sum_size * _copies(options, job) if route.backend == "torch" else 0),
        block_row=(2 * operand_size + (sum_size if route.cpu_exponentials else 0)) * sum(features),
        class_blocks=by_class,
    )
    workspace = granted(options.workspace, options.dense, needs, narrow)
    if PRODUCT_PART * PRODUCT_ROWS * product > workspace:
        needs = replace(needs, product_rows=PRODUCT_ROWS // 2)
    return workspace, needs


def _copies(options: Options, job: Job) -> int:
    """Tensors as large as the logits that the pass in torch makes beside them."""
    several = (bool(options.softcap), job.log_probs, job.probabilities, job.wanted.scale)
    return 2 * sum(several)


def _sums(options: Options, job: Job) -> int:
    """What the exponential path adds up for each tile of logits."""
    return 1 + 3 * int(job.log_probs) + int(job.wanted.scale)
