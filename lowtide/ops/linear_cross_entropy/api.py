"""Define the public function of the fused head and loss. Its docstring is the contract."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lowtide.core.autodiff import in_shape
from lowtide.core.errors import advises
from lowtide.core.fsdp import gathers_head
from lowtide.ops.linear_cross_entropy import dispatch, positions, sharding
from lowtide.ops.linear_cross_entropy.data_sharded import takes_data_sharded_head
from lowtide.ops.linear_cross_entropy.definition import advice
from lowtide.ops.linear_cross_entropy.definition.head import Backend, Reduction, Tensors
from lowtide.ops.linear_cross_entropy.operator import signatures


@advises(advice.INSTEAD_OF, advice.USAGE, otherwise=advice.OTHERWISE)
@gathers_head
@takes_data_sharded_head
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor | None = None,
    z_loss: float = 0.0,
    row_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    workspace: int | None = None,
    backend: Backend = "auto",
    group: ProcessGroup | None = None,
    first_class: int | None = None,
    num_classes: int | None = None,
    tokens_sharded: bool = False,
    segments: int | None = None,
) -> Tensor:
    r"""Compute `cross_entropy(linear(input, linear_weight, linear_bias), target)` without logits.

    Example::

        loss = lowtide.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, tokens[:, 1:])
        loss.backward()

    With :math:`u_i = W x_i + b`, logit scale s and soft cap c, the logits of a row are
    :math:`z_i = s u_i`, or :math:`c \tanh(s u_i / c)`. With :math:`w` the class weights,
    :math:`\epsilon` the label smoothing, :math:`t_i` the target and :math:`\lambda` the z-loss, the
    loss of a row is

    .. math::
        \ell_i = (1-\epsilon)\, w_{t_i} \bigl(\mathrm{lse}(z_i) - z_{i t_i}\bigr)
                 + \frac{\epsilon}{V} \sum_v w_v \bigl(\mathrm{lse}(z_i) - z_{iv}\bigr)
                 + \lambda\, \mathrm{lse}(z_i)^2,

    and 0 where :math:`t_i` is `ignore_index`. For class probabilities :math:`y_i` the first term is
    :math:`(1-\epsilon) \sum_v y_{iv} w_v (\mathrm{lse}(z_i) - z_{iv})`. `"sum"` adds up the
    losses of the rows. `"mean"` divides this sum by the total :math:`w_{t_i}` of the rows that
    count, or for probabilities by the number of rows, as
    :func:`torch.nn.functional.cross_entropy` does. If all rows are ignored, the mean is NaN and its
    gradients are zero, as in torch. With a `normalizer`, `"mean"` divides the sum by that number
    instead. Arguments that torch's own ``linear_cross_entropy`` (2.13, without `options`) accepts
    give the same result here, even if there are no rows, features, classes or positions.

    Shapes:
        input [..., D], linear_weight [V, D], target [...] or [..., V], linear_bias [V], weight [V],
        logit_scale [], row_weight [...]; the result is 0-d, or [...] for ``reduction="none"``. For
        an input [D] the class index may also have shape [1]. Any strides are accepted; a shifted
        slice such as ``hidden[:, :-1]`` is not copied as a whole.
        A K-dimensional loss has one head for each position over the same rows, as in torch's
        function of this name: input [N, D], linear_weight [V, d1, ..., dK, D], linear_bias
        [V, d1, ..., dK], target [N, d1, ..., dK] or [N, V, d1, ..., dK], row_weight and result
        [N, d1, ..., dK].
        Tensors on the meta device give a loss and gradients of the right shapes and dtypes.

    Args:
        target: class indices, int64, int32 or uint8, or class probabilities in any floating-point
            dtype. An index outside [0, V) that is not `ignore_index` raises an IndexError on the
            CPU. On CUDA, where a check would wait for the device, such an index makes the row's
            loss NaN, and with it the result and the gradients that depend on this loss.
            Probabilities need not add up to 1; for their gradient see `Memory`.
        linear_bias: in the input's dtype, or in float32 beside half precision.
        weight: class weights in any floating-point dtype; with probabilities, also integers. With
            class indices they take no gradient, as in torch.
        ignore_index: rows with this target do not count; None means -100. It cannot be given with
            probabilities.
        label_smoothing: :math:`\epsilon`, in [0, 1]; a value below 0, or NaN, means 0, as in torch.
        softcap: c, above 0; None for none. (Gemma 2: 30.)
        logit_scale: s; a 0-d tensor may require a gradient. It is applied before the soft cap: to
            divide capped logits by a temperature T, pass ``logit_scale=1 / T, softcap=c / T``.
        z_loss: :math:`\lambda`; 1e-4 in PaLM (arxiv.org/abs/2204.02311).
        row_weight: weights of tokens or samples, in any floating-point dtype and of any sign. Each
            multiplies its :math:`\ell_i`, z-loss and label smoothing included, in the dtype of the
            sums. A weight of 0 takes a row out of the sum. The weight of an ignored row is not
            used, even if it is NaN. Row weights take no gradient, and do not change what `"mean"`
            divides by; for a weighted mean, pass the sum of the weights that count as `normalizer`.
            (torch has no such option.)
        normalizer: the number that `"mean"` divides the sum by in place of its own count: a number
            above 0, or a 0-d tensor on the input's device or the CPU. Pass the number of tokens of
            an accumulated batch (Trainer's `num_items_in_batch`), or, where gradients are averaged
            over ranks, :func:`lowtide.tokens_per_rank`. If all rows are ignored, the loss and the
            gradients are 0. A tensor of 0 says that no token counts at all: then the loss is NaN,
            and the gradients are 0. A tensor below 0, infinite or NaN is an error on the CPU. On
            CUDA, and in a graph, such a tensor divides the sum without an error: a check would wait
            for the device. The ranks of a divided head do compare their tensors. A normalizer takes
            no gradient, and is an error with `"sum"` and `"none"`. (torch has no such option.)
        workspace: bytes that the call may hold beyond inputs, the loss and the gradients. None is
            64 MiB. On CUDA it is 1 GiB plus the float32 sum of a half-precision weight's
            gradient (4 V D bytes). A small call gets no more than eager torch would hold
            (see `Default`). A smaller workspace costs time; it costs exactness only where sums have
            20 bits (see `Precision`). Three things are not counted. On CUDA under autocast, a
            weight of another dtype is cast as a whole once, like autocast's own copy. On CUDA,
            half-precision operands that GEMMs read slowly are copied, and the copies are held until
            backward: operands whose features are no multiple of 8, those whose rows do not begin at
            multiples of 16 bytes, and inputs by columns. And cuBLAS has a workspace of its own.
        backend: `"auto"` runs `"triton"` for CUDA tensors up to float32 where Triton is installed,
            else `"torch"`. `"reference"` is the plain definition, which holds all logits whatever
            the workspace.
        group: a torch.distributed.ProcessGroup over whose ranks the classes are divided;
            linear_weight, linear_bias and weight are then this rank's rows, and probabilities its
            columns. Pass None if linear_weight is a DTensor, whose placements say the same, or if
            one process has all classes.
        first_class, num_classes: the class of this rank's first row, and V. By default all ranks
            have as many rows as this one, in order. Rows from `num_classes` on are padding.
        tokens_sharded: True if each rank of the group passes tokens of its own, whose losses count
            together; False if all ranks pass the same tokens.
        segments: divide the classes into this many segments, and merge their statistics in order.
            Then the bits of the result do not depend on the number of ranks; see the page "A head
            whose classes are divided over ranks" of the documentation.

    Sharded heads:
        The classes may be divided over ranks (tensor parallelism): linear_weight is a DTensor with
        placement ``Shard(0)`` over one dimension of its mesh, or this rank's rows, with a `group`.
        All options are exact. The loss is the same on all ranks, the input's gradient arrives
        summed over the ranks, and the weight's gradient stays on its rank. Chunk by chunk, the
        ranks gather three numbers a row (more with some options) and sum the input's gradient. No
        rank holds logits of all classes. In each call the hosts check that the calls of all ranks
        fit together. The hosts wait for each other, and on CUDA none waits for its card. Such a
        head has first derivatives by backward alone. The page "A head whose classes are divided
        over ranks" of the documentation has the rest.

    Precision:
        Products take operands in the input's dtype (autocast's under autocast). Their sums, the
        logits, the statistics and the sum of the weight's gradient are float32; float64 stays
        float64.
        On Hopper the sum of the weight's gradient has 24 bits where a pipelined kernel forms it, or
        where a float32 sum (four bytes a weight) leaves too little room for the rows of a chunk. It
        has 20 bits where a sum of 24 bits (one byte a weight beside the gradient) leaves too little
        room as well. Each chunk rounds the sum so far by at most 2^-16 (2^-12 for 20 bits) of its
        value. On Hopper the gradient of a float32 weight whose products take bfloat16 operands may
        also have 24 bits between chunks; autocast itself rounds this gradient to bfloat16.
        Each gradient is rounded once; for mean and sum, twice if the upstream gradient is not a
        power of two. The loss is float32 for half-precision input: a bfloat16 loss has three
        digits. With bfloat16 probabilities on Hopper, the softmax in a logit's gradient has a
        relative error of 5e-4 before it is rounded to bfloat16. The loss is float64 if the
        probabilities, or the class weights beside them, are float64.
        On the CPU half-precision operands are converted to float32 for the products. The exception
        is a call with bfloat16 tensors and 2^16 weights or more, if the CPU has units for bfloat16
        and there is a C++ compiler.

    Memory:
        The call holds O(workspace), never N V: it works on a chunk of tokens at a time. For mean
        and sum the gradients are formed in forward (three products) and held until backward. For
        none, backward recomputes the logits (four products).
        A half-precision weight's gradient is summed in float32. A part of this sum lies in the
        gradient's own memory (on Hopper in 24 or 20 bits, on the CPU in float32) where that is
        quicker, or where the workspace has no room for the whole sum. There is no sum if one chunk
        holds all tokens, at most V / 4, and a single product forms the gradient: on Hopper, or on a
        CPU with units for bfloat16, where tokens may also be more if no sum has room. If even a sum
        in part leaves room for too few rows, the gradient is formed class block by class block,
        which takes one more product.
        The workspace does not count the memory in which products pack their operands. Such memory
        is PyTorch's own, and, on a CPU with units for bfloat16, also lowtide's: up to 0.5 MiB and
        128 bytes a row of a chunk for each thread, and up to 1 MiB or 128 bytes a row that the
        threads share.
        Derivatives of higher order, forward mode, vmap, and gradients of probabilities or class
        weights differentiate the definition itself, chunk by chunk. They hold O(workspace) as well,
        and copies of the operands in the dtype of the sums. They are exact, but not fast.
        A K-dimensional loss computes one position after the other, each with this workspace. It
        also holds up to three float32 tensors of the input's size, and one position's part of the
        weight's gradient (for float16 all of this gradient is held in float32). With
        ``reduction="none"`` each position takes four products, and the weight's gradient exists
        twice while it is put together.
        Backward runs on the engine that forward took. If hooks bring a saved tensor back in a
        layout that this engine cannot read, or compiled code gets a tensor that begins at another
        address, a copy of that tensor is held beside the workspace as long as the operator runs.

    Default:
        Without a `workspace`, the peak of forward and backward is no higher than that of eager
        torch's ``cross_entropy(linear(input, linear_weight), target)`` in the same dtype, whose
        logits and loss are half precision for half-precision operands. Beyond inputs and gradients
        that peak is 3 s N V bytes less the gradients, or o N V if this is more. Where no gradient
        is wanted, it is 2 s N V. Here o is the bytes of a number of the operands, and s the bytes
        of a logit in the loss: the same as o, or 4 under autocast. With options eager torch holds
        more, which is not counted here.
        A call may hold more than that peak. It may add 4 MiB (64 MiB on CUDA) and 128 bytes (256
        on CUDA) for each token, feature and class, so that a small call is not cut into pieces. On
        CUDA it may add o N D where N is at most V / 2, to scale the input. On CUDA under autocast
        it may add up to o N V, where N is below D. As with any workspace, it adds packed operands,
        the float32 sums and copies of further linear terms, and what a K-dimensional loss holds
        (see `Memory`). A rank of a divided head with few tokens adds the rows of dX that the ranks
        sum, in float32, and as many bytes again: some 50 MiB for 1,024 tokens of 4,096 features.
        Where the gradients are large beside the logits (N below about D), this limit is below the
        whole default, and a call of more than V / 4 tokens may take four products instead of three:
        pass a workspace for speed. So may fewer tokens with label smoothing or under autocast. A
        float16 weight takes three products wherever these bytes hold a chunk of all tokens.
        In compiled and exported graphs, which serve every N, None means the whole default. It does
        so too for derivatives of higher order, forward mode, vmap, and gradients of probabilities
        or class weights.

    NaN and infinities reach the loss as in torch. A NaN in an ignored row reaches no loss. Whether
    it reaches gradients depends on the path: the CPU leaves the row out, and so do large calls on
    Hopper (see the page "The loss" of the documentation); a path that multiplies the row by 0 keeps
    the NaN. An upstream gradient that is not finite makes an ignored row's gradient NaN for mean
    and sum. If all targets have class weight 0, smoothing makes the mean infinite; in torch it is
    NaN. The mean over one ignored row without a batch is NaN here; in torch it is 0 on CUDA and NaN
    everywhere else.

    FSDP2: a sharded parameter is gathered once around the call, and its gradient is reduced once
    after backward, whichever unit the head belongs to (see the page "DDP, FSDP2 and tensor
    parallelism" of the documentation).

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices and options that do not fit, for sparse,
            nested, mkldnn and quantized tensors, for ``full_tensor()`` of a parameter that FSDP2
            shards, or for a workspace that cannot hold one row of logits and the vectors of N and V
            numbers. Each is also a RuntimeError, which is what torch raises.
        IndexError: see `target`. (Under vmap such a target gives NaN.)

    Transforms: torch.compile(fullgraph=True), torch.export, CUDA graphs, torch.func, vmap, forward
    mode, derivatives of any order, and checkpointing work. Compiled code serves every length, but
    only one value of each of softcap, z_loss and label_smoothing: another value compiles it again.
    An exported program can be trained, with the gradients that were required when it was exported;
    for other gradients its backward raises an error. Transforms do not nest with compilation: code
    that torch.compile compiles as one graph refuses a transform of torch.func or forward mode
    around this call, and a target or class weights that require a gradient. Compiled code cannot be
    differentiated twice.

    Source: pytorch issue 124480; the chunk loop is that of
    github.com/mgmalek/efficient_cross_entropy.
    """
    others = linear_bias, logit_scale, weight, row_weight, normalizer
    operands, known = Tensors(input, linear_weight, target, *others), None
    if group is first_class is num_classes is segments is None and not tokens_sharded:
        call_options = reduction, ignore_index, label_smoothing, softcap, z_loss, workspace, backend
        known = signatures.signature(operands, *call_options)
        remembered = signatures.run(known, operands)
        if remembered is not None:
            return remembered[0]
    tensors = operands._asdict()
    del tensors["normalizer"]  # a number, which is not divided over ranks
    options: dict[str, Any] = {
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "z_loss": z_loss,
        "workspace": workspace,
        "backend": backend,
    }
    call, loss = sharding.run_sharded(
        partial(_loss, normalizer=normalizer, **options),
        tensors,
        sharding.Division(group, first_class, num_classes, tokens_sharded, segments),
    )
    signatures.remember(known, operands, **options)
    return call.returned(loss, by_row=reduction == "none")


def _loss(input: Tensor, linear_weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Compute the loss of this rank's tensors."""
    if isinstance(linear_weight, Tensor) and linear_weight.dim() > 2:
        loss = dispatch.run(*positions.call_of(input, linear_weight, target, **options))
        rows = (*input.shape[:1], *linear_weight.shape[1:-1])
        return in_shape(loss, rows) if options["reduction"] == "none" else loss
    call = (input,), (linear_weight,), target
    if options["shard"] is None:
        return dispatch.cross_entropy(*call, **options)
    compute = lambda: (dispatch.cross_entropy(*call, **options),)  # noqa: E731
    return signatures.through((input, linear_weight, target), options, compute)[0]
