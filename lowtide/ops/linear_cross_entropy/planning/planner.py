"""Make the plan of a call from shapes, dtypes and the device, never from the values of tensors.

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

# A single GEMM over all tokens forms the rows of the target classes again. This pays from so many
# classes per token on.
CLASSES_PER_TOKEN = 16  # decision 0016

# A GEMM that forms dX has half as many rows where its result would take more than 1/40 of the
# workspace. Half as many rows are hardly slower, and more rows per chunk gain more.
PRODUCT_PART = 40  # decision 0032


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold every decision about one call; forward and backward follow it."""

    options: Options
    job: Job
    workspace: int
    """Bytes that the call may hold beyond inputs, outputs and gradients."""
    compute_dtype: torch.dtype
    """Dtype of the GEMM operands.

    This is the options' dtype. For half precision on the CPU it is float32, except in
    exponentials/cpu_engine.py.
    """
    copies_rows: tuple[bool, ...]
    """One flag per term: True if a chunk of the input is copied, for its dtype or its strides."""
    scales_in_gradient: tuple[bool, ...]
    """One flag per term: True if a chunk's rows, scaled for dW, fit in the memory of its dX.

    See exponentials/linear_term.py.
    """
    rows: int
    """Tokens per chunk."""
    chunk_classes: int
    """Classes of a chunk at a time; V, except in the exponentials engine with "by_class"."""
    operand_classes: int
    """Classes whose weight rows are copied at a time; V if no copy is needed."""
    product_rows: int
    """Most rows of one dX GEMM in the exponentials engine; with "by_class" the whole chunk."""
    narrow_rows: int
    """Rows of a chunk at a time for which one kernel forms both GEMMs of a second, narrow term.

    See exponentials/low_rank.py. 0: two separate GEMMs.
    """
    weight_gradient: WeightGradient
    """How the first term's weight gradient is formed; those of other terms are accumulated."""
    sum_bits: int
    """Bits of a sum that lies partly in the gradient's memory ("split"), on CUDA."""
    block_rows: int
    """Tokens per chunk of a class block ("by_class")."""
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
        """Dtype of logits, row statistics and accumulators: float64 for float64, else float32."""
        return self.options.sum_dtype


def make_plan(head: Head, options: Options, job: Job) -> Plan:
    """Return the plan of a call whose engine is chosen."""
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
    """Return the options plus the facts that a compiled graph is specialised on.

    Forward and backward share them: the engine, `few_tokens`, and the memory of the dense
    computation.
    """
    layout = head.first_position if head.by_position else head
    engine = choose_engine(layout, options, job).engine
    dense = dense_workspace(head, options, job.wanted.all)
    return options._replace(few_tokens=few_tokens(head), engine=engine, dense=dense)  # decision 0014


def few_tokens(head: Head) -> bool:
    """Return True if a single GEMM over all tokens may form a weight gradient."""
    return tokens_decide(head.tokens) and head.tokens * CLASSES_PER_TOKEN <= head.classes


def keeps_sum(head: Head, options: Options, job: Job) -> bool:
    """Return True if the first weight gradient is kept as a float32 sum until backward.

    The shapes and dtypes of the operator's outputs depend on nothing else of the plan. This uses N
    as little as possible, because N may be symbolic.
    """
    return weight_gradient(*_needs(head, options, job, route_of(head, options))) == "accumulate"


def held(head: Head, options: Options, job: Job) -> int:
    """Return the bytes that a call takes beyond its arguments and results.

    These are part of the workspace and, under autocast on CUDA, the copies of the weights.
    """
    route = route_of(head, options)
    workspace, needs = _needs(head, options, job, route)
    cast = [each for each in head.weights if each.is_cuda and each.dtype != route.compute_dtype]
    copies = sum(each.numel() * route.compute_dtype.itemsize for each in cast)
    return copies + spent(needs, spend(workspace, needs))


def _scales_in_gradient(head: Head, job: Job, route: Route) -> tuple[bool, ...]:
    """Return one flag per term: a scaled row fits in the memory of the row's gradient."""
    return tuple(
        grad and input.dtype.itemsize >= route.compute_dtype.itemsize
        for input, grad in zip(head.inputs, job.wanted.inputs)
    )


def _of_strips(head: Head, options: Options, job: Job, route: Route) -> int:
    """Return the bytes per token of a narrow term's partial products, one per strip of classes.

    0 without a narrow term, or where not both of its gradients are wanted.
    """
    if not route.exponentials or [*zip(job.wanted.inputs, job.wanted.weights)][1:] != [(True, True)]:
        return 0
    R = head.inputs[1].shape[-1]
    return -(-head.classes // STRIP) * R * options.sum_dtype.itemsize if R <= NARROW else 0


def _narrow_rows(needs: Needs, sizes: Sizes) -> int:
    """Return the rows at a time for which both GEMMs of a narrow term are formed together."""
    if not needs.of_strips or sizes.weight_gradient == "by_class":
        return 0
    most, tile = needs.in_turn(sizes.rows) // needs.of_strips, ROW_TILE[needs.device]
    if most >= sizes.rows:
        return sizes.rows
    return max(1, most - most % tile if most > tile else most)


def _needs(head: Head, options: Options, job: Job, route: Route) -> tuple[int, Needs]:
    """Return the workspace in bytes, and the bytes that each part of the call takes."""
    wanted, sum_dtype, device = job.wanted, options.sum_dtype, head.device.type
    N, V, D = head.tokens, head.classes, head.inputs[0].shape[-1]
    features = [input.shape[-1] for input in head.inputs]
    sum_size, operand_size = sum_dtype.itemsize, route.compute_dtype.itemsize
    # On CUDA another dtype means autocast: one copy of the whole weight, which no workspace
    # includes.
    weight = head.weights[0]
    copies_weight = (weight.dtype != route.compute_dtype and device == "cpu") or not multiplies(weight)

    # Only the Triton kernel rounds in place: it does so before it stores a number.
    rounds_apart = route.backend == "torch" and route.compute_dtype != sum_dtype
    logit = sum_size + (operand_size if rounds_apart else 0)
    if route.cpu_exponentials:
        logit = operand_size
    found = product = 0
    keeps_exponentials = route.exponentials and wanted.some
    if route.exponentials:  # bfloat16 exponentials, and float32 partial sums for every 128 classes
        logits = (V + 8) * operand_size if keeps_exponentials else 0
        found = V // 32 * _sums(options, job)
    elif route.distances:  # the same with four sums (the interpreter's tiles are smaller)
        logits = V // 8 + 2048 + ((V + 8) * operand_size if wanted.some else 0)
    elif route.cpu_exponentials:
        logits = V * logit if wanted.some else 0
    else:
        logits = V * (logit if wanted.some else sum_size)
        if route.backend == "torch":
            logits += V * sum_size * _copies(options, job)
    row = logits + 24 * sum_size  # and row statistics
    gathered = 0
    for k, D_k in enumerate(features):
        if route.copies_rows[k]:
            of_row, at_once = copied_bytes(head.inputs[k], route.compute_dtype)
            row, gathered = row + of_row, max(gathered, at_once)
        if route.cpu_exponentials:  # rows of the weight for the targets, and their products
            row += (2 * sum_size + operand_size) * D_k
        if not route.exponentials:
            row += wanted.inputs[k] * sum_size * D_k
            continue
        product = max(product, wanted.inputs[k] * sum_size * D_k)
        if wanted.weights[k] and not _scales_in_gradient(head, job, route)[k]:
            row += D_k * operand_size
    of_strips = _of_strips(head, options, job, route)
    if of_strips:  # and the chunk's rows of dX, kept as long as the chunk lasts
        row += features[1] * sum_size
    # The bias, its gradient, a chunk's share of that gradient, and temporaries of their size.
    of_bias = 11 if route.exponentials else 6 if route.cpu_exponentials else 3
    vectors = (of_bias * int(head.bias is not None) + int(job.class_weights)) * V * sum_size
    # A CUDA allocation is a multiple of 512 bytes, and about eighty vectors and numbers are
    # smaller.
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
        else:  # small, and always accumulated
            copied = weight.dtype != route.compute_dtype or not multiplies(weight)
            narrow += size + (V * features[k] * operand_size if copied else 0)
    fixed += narrow
    # A packed sum takes this much beyond the gradient's memory: on CUDA with tensor maps one byte
    # per weight or half a byte (packed_triton.py), on the CPU half of its own size (in_place.py).
    split_sum = split_sum_20 = at_once = 0
    if (route.exponentials or route.distances) and head.weights[0].dtype == torch.bfloat16:
        split_sum, split_sum_20 = min(weight_sum, V * D), min(weight_sum, V * D // 2)
        # Label smoothing adds to every row of the gradient, so a single GEMM would not be its only
        # writer.
        if route.exponentials and options.few_tokens and not options.label_smoothing:
            at_once = TARGETS * (N * operand_size + D * sum_size)
    elif device == "cpu" and head.weights[0].dtype.itemsize * 2 == sum_size:
        split_sum = min(weight_sum, (V - V // 2) * D * sum_size)
    by_class = None
    if route.exponentials and weight_sum:
        fixed += 4 * V  # the place of each class in the sorted targets
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
            gradient_row=copies + 40 * wanted.bias,  # the bias gradient is a GEMM with ones
            class_sum=D * sum_size + 64 * wanted.bias,
        )
    maps_sum = split_sum_20 > 0 and D % 16 == 0  # the tensor map of the lower bits requires it
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
    """Return how many tensors as large as the logits the torch softmax holds beside them."""
    several = (bool(options.softcap), job.log_probs, job.probabilities, job.wanted.scale)
    return 2 * sum(several)


def _sums(options: Options, job: Job) -> int:
    """Return how many partial sums the exponentials engine keeps per row and half tile."""
    return 1 + 3 * int(job.log_probs) + int(job.wanted.scale)
