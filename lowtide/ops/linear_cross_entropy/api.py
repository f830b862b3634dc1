"""The public entry points of the fused head and loss. Their docstrings are the contract."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowtide.core.checks import check_tensors
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.linear_cross_entropy import dispatch, positions
from lowtide.ops.linear_cross_entropy.definition.head import Backend, Reduction
from lowtide.ops.linear_cross_entropy.definition.validation import check_loss_options
from lowtide.ops.linear_cross_entropy.dispatch import LogProbs


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
    workspace: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    r"""Compute `cross_entropy(linear(input, linear_weight, linear_bias), target)` without the logits.

    Example::

        loss = lowtide.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, tokens[:, 1:])
        loss.backward()

    With :math:`u_i = W x_i + b`, logit scale s and soft cap c, the logits of a row are :math:`z_i = s u_i`,
    or :math:`c \tanh(s u_i / c)`. With :math:`w` the class weights, :math:`\epsilon` the label smoothing,
    :math:`t_i` the target and :math:`\lambda` the z-loss, the loss of a row is

    .. math::
        \ell_i = (1-\epsilon)\, w_{t_i} \bigl(\mathrm{lse}(z_i) - z_{i t_i}\bigr)
                 + \frac{\epsilon}{V} \sum_v w_v \bigl(\mathrm{lse}(z_i) - z_{iv}\bigr)
                 + \lambda\, \mathrm{lse}(z_i)^2,

    0 where :math:`t_i` is `ignore_index`. For class probabilities :math:`y_i` the first term is
    :math:`(1-\epsilon) \sum_v y_{iv} w_v (\mathrm{lse}(z_i) - z_{iv})`. `"sum"` adds the rows up; `"mean"`
    divides that by the :math:`w_{t_i}` of the rows that count (for probabilities: by the number of rows), as
    :func:`torch.nn.functional.cross_entropy` does. With all rows ignored the mean is NaN and its gradients
    are zero, as there. What torch's own ``linear_cross_entropy`` (2.13, without `options`) takes gives the
    same here, also without rows, features, classes or positions; what is more is said below.

    Shapes:
        input [..., D], linear_weight [V, D], target [...] or [..., V], linear_bias [V], weight [V],
        logit_scale [], row_weight [...]; the result is 0-d, or [...] for ``reduction="none"``. An input [D]
        takes a class as [1], too. Any strides; a shifted slice such as ``hidden[:, :-1]`` is not copied as a
        whole.
        K-dimensional loss, of a head for each position over the same rows, as in torch's function of this
        name: input [N, D], linear_weight [V, d1, ..., dK, D], linear_bias [V, d1, ..., dK], target
        [N, d1, ..., dK] or [N, V, d1, ..., dK], row_weight and result [N, d1, ..., dK].
        Tensors on the meta device give a loss and gradients of the right shapes and dtypes.

    Args:
        target: class indices, int64, int32 or uint8, or class probabilities in any floating-point dtype. An
            index outside [0, V) that is not `ignore_index` is an IndexError on the CPU; on CUDA, where
            looking would mean waiting, it makes the loss and the gradients that it reaches NaN.
            Probabilities need not add up to 1; a gradient for them takes the way described under `Memory`.
        linear_bias: in the input's dtype, or in float32 beside half precision; the sums are in that anyway.
        weight: class weights of any floating-point dtype; beside probabilities of integers, too. They take no
            gradient beside class indices, as in torch.
        ignore_index: rows with this target count for nothing; None means -100. Not for probabilities.
        label_smoothing: :math:`\epsilon`, in [0, 1]; below 0, or NaN, it is 0, as in torch.
        softcap: c, above 0; None for none. (Gemma 2: 30.)
        logit_scale: s; a 0-d tensor may require a gradient. It comes before the soft cap: to divide capped
            logits by a temperature T, pass ``logit_scale=1 / T, softcap=c / T``.
        z_loss: :math:`\lambda`; 1e-4 in PaLM (arxiv.org/abs/2204.02311).
        row_weight: multiplies each :math:`\ell_i`, z-loss and label smoothing included: weights of tokens or
            of samples, of any floating-point dtype and sign, used in that of the sums. 0 takes a row out of
            the sum; the weight of an ignored row is not used, even if it is NaN. They take no gradient.
            `"mean"` divides by what it divides by without them; for a weighted mean, pass
            ``reduction="sum"`` and divide by the sum of the weights that count. (torch has no such option.)
        workspace: bytes that the call may hold beyond inputs, the loss and the gradients. None is 64 MiB on
            the CPU; on CUDA 1 GiB, and the float32 sum of a half-precision weight's gradient on top (4 V D
            bytes); for a small call no more than eager torch would hold (see `Default`). A smaller one
            costs time, and exactness only as said of 20 bits under `Precision`. On CUDA under autocast, a
            weight of another dtype is cast as a whole once, like autocast's own copy, and cuBLAS has its own
            workspace; neither is counted.
        backend: `"auto"` runs `"triton"` for CUDA tensors up to float32 where Triton is installed, else
            `"torch"`. `"reference"` is the plain definition, which holds all logits whatever the workspace.

    Precision:
        Products take their operands in the input's dtype (autocast's under autocast) and are summed in
        float32, as are the logits, the statistics and the gradient of the weight (on Hopper, where a pipeline
        forms that sum or four bytes a weight leave too little for the rows of a chunk, in 24 bits, where one
        byte does in 20: each chunk rounds by at most 2^-16 or 2^-12 of what it adds up to. There a float32
        weight's gradient of bfloat16 products, which autocast's own rounds to bfloat16, may be in 24 bits
        between chunks, too); float64 stays float64. Each gradient is rounded once, for mean and sum twice if
        the upstream gradient is no power of two. The loss is float32 for half-precision input: a bfloat16
        loss has three digits. Beside bfloat16 probabilities, on Hopper, the softmax in a logit's gradient is
        known to 5e-4 of itself before that is rounded to bfloat16. Beside probabilities it is float64 where
        they, or the class weights, are. On the CPU half-precision products are of float32 operands, but for
        bfloat16 tensors of 2^20 weights and more where it has units for them and a C++ compiler, without soft
        cap, label smoothing, probabilities or a learned scale.

    Memory:
        O(workspace), never N V: a chunk of tokens at a time. For mean and sum the gradients are formed in
        forward (three products) and held until backward; for none, backward recomputes the logits (four
        products). A half-precision weight's gradient is summed up in float32, or, where that is quicker or
        the workspace has no room for it, partly in the gradient's own memory (on Hopper in 24 or 20 bits, on
        the CPU in float32); where that leaves too few rows, class block by class block, for one more product.
        Beside it is what products pack of their operands: PyTorch's, or on a CPU with units for bfloat16 its
        own, up to 0.5 MiB and 128 bytes a row of a chunk a thread, and up to 1 MiB or 128 bytes a row that
        they share. Derivatives of higher order, forward mode, vmap, and gradients of probabilities or class
        weights differentiate the definition itself chunk by chunk: O(workspace) as well, beside copies of the
        operands in the dtype of the sums; exact, not fast. A K-dimensional loss of several positions takes
        one after the other, each with this workspace, beside up to three float32 tensors of the input's size
        and one position's part of the weight's gradient (of which all waits in float32 for float16); with
        ``reduction="none"`` four products each, and the weight's gradient once more as it is put together.
        Backward runs on the engine that forward took. Where hooks bring a saved tensor back in a layout which
        that engine cannot read, or compiled code gets one that begins elsewhere, a copy of it is held beside
        the workspace as long as the operator runs.

    Default:
        Without a `workspace`, forward and backward hold no more at their highest moment than eager torch's
        ``cross_entropy(linear(input, linear_weight), target)`` in the same dtype, whose logits and loss are
        half precision for half-precision operands. Beyond inputs and gradients that is 3 s N V bytes less the
        gradients, or o N V if that is more; 2 s N V where no gradient is wanted. o is the size of an operand,
        s that of a logit in the loss, o again or under autocast 4. Options make eager torch hold more, and
        are not counted.
        Above that a call may hold 4 MiB (16 MiB on CUDA) and 64 bytes (256 on CUDA) for each of N + D + V,
        so that a small call is not made of single rows and classes; on CUDA under autocast up to o N V, where
        N is below D; and, as with any workspace, what products pack, the float32 sums and copies of further
        linear terms, and what a K-dimensional loss holds (see `Memory`).
        Where the gradients are large beside the logits (N below about D), that leaves less than the whole
        default, and a call may take four products instead of three: pass a workspace for speed.
        None is the whole default, whatever N is, in compiled and exported graphs, which serve every N, and
        for derivatives of higher order, forward mode, vmap, and gradients of probabilities or class weights.

    NaN and infinities reach the loss as in torch. A NaN in an ignored row reaches no loss; whether it reaches
    gradients depends on the path (on the CPU the row is left out; where it is multiplied by 0 it does). An
    upstream gradient that is not finite makes an ignored row's gradient NaN for mean and sum. Where all
    targets have class weight 0, smoothing makes the mean infinite, and NaN in torch; torch's own mean over
    one ignored row without a batch is 0 on CUDA, and NaN, as here, everywhere else.

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices and options that do not fit, for sparse, nested,
            mkldnn and quantized tensors, or a workspace below one row and the vectors of N and V numbers that
            go with it. Each is also a RuntimeError, which is what torch raises.
        IndexError: see `target`. (Under vmap such a target makes NaN.)

    Transforms: torch.compile(fullgraph=True), torch.export, CUDA graphs, torch.func, vmap, forward mode,
    derivatives of any order, checkpointing. Compiled code serves every length, but only one value of each of
    softcap, z_loss and label_smoothing: it is compiled again for another. An exported program can be trained,
    with the gradients that were required when it was exported; for others its backward raises. Not within
    one another: code that torch.compile compiles as one graph refuses a transform of torch.func or forward
    mode around this call, and what it compiled cannot be differentiated twice.

    Source: pytorch issue 124480; the chunk loop is that of github.com/mgmalek/efficient_cross_entropy.
    """
    options: dict[str, Any] = {
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "z_loss": z_loss,
        "row_weight": row_weight,
        "workspace": workspace,
        "backend": backend,
    }
    if isinstance(linear_weight, Tensor) and linear_weight.dim() > 2:
        loss = dispatch.run(*positions.call_of(input, linear_weight, target, linear_bias, weight, **options))
        rows = (*input.shape[:1], *linear_weight.shape[1:-1])
        return loss.view(rows) if reduction == "none" else loss
    return dispatch.cross_entropy(
        (input,), (linear_weight,), target, linear_bias=linear_bias, weight=weight, **options
    )


def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float | Tensor | None = None,
    ignore_index: int | None = -100,
    workspace: int | None = None,
    backend: Backend = "auto",
) -> LogProbs:
    r"""Return `LogProbs(log_prob, entropy, logsumexp, argmax)` of each token, without the logits.

    Example::

        found = lowtide.linear_log_probs(hidden, model.lm_head.weight, tokens, logit_scale=1 / temperature)
        ratio = (found.log_prob - old_log_prob).exp()

    With the logits :math:`z_i` of :func:`linear_cross_entropy` and :math:`p_i = \mathrm{softmax}(z_i)`,

    .. math::
        \mathrm{log\_prob}_i = z_{i t_i} - \mathrm{lse}(z_i), \quad
        \mathrm{entropy}_i = -\sum_v p_{iv} \log p_{iv}, \quad
        \mathrm{logsumexp}_i = \mathrm{lse}(z_i), \quad
        \mathrm{argmax}_i = \arg\max_v z_{iv}.

    The first three are differentiable with respect to input, linear_weight, linear_bias and logit_scale, for
    any upstream gradient of each, alone or together:

    .. math::
        \frac{\partial\, \mathrm{log\_prob}}{\partial z_v} = [v = t] - p_v, \quad
        \frac{\partial\, \mathrm{entropy}}{\partial z_v} = -p_v (\log p_v + \mathrm{entropy}), \quad
        \frac{\partial\, \mathrm{lse}}{\partial z_v} = p_v.

    Shapes:
        input [..., D], linear_weight [V, D], target [...], linear_bias [V]; each result [...].

    Args:
        ignore_index: None means -100. A row with this target is skipped: its log_prob, entropy and logsumexp
            are 0, without gradient, and its argmax is -1. To have the last three for every row, give every
            row a class.
        logit_scale: 1 / temperature; a float, or a 0-d tensor that may require a gradient.
        The others are those of :func:`linear_cross_entropy`.

    Dtypes: float32 (float64 for float64 input), argmax int64. Entropy is in nats.

    Memory: O(workspace), never N V; three numbers a row are kept for backward, which recomputes the logits
    (four products in all). Backward costs nothing for a result that has no upstream gradient.

    Raises: as :func:`linear_cross_entropy`.

    Source: the per-token quantities of PPO (arxiv.org/abs/1707.06347), DPO (arxiv.org/abs/2305.18290) and
    GRPO (arxiv.org/abs/2402.03300); asked for in Liger-Kernel issue 873 and TRL issue 7244.
    """
    return dispatch.log_probs(
        (input,),
        (linear_weight,),
        target,
        linear_bias=linear_bias,
        softcap=softcap,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        workspace=workspace,
        backend=backend,
    )


class LinearCrossEntropyLoss(nn.Module):
    """Own the head, `.linear` (a :class:`torch.nn.Linear`), and compute :func:`linear_cross_entropy`.

    Example::

        criterion = lowtide.LinearCrossEntropyLoss(4096, 128256, device="cuda", dtype=torch.bfloat16)
        loss = criterion(hidden, target)            # hidden [..., 4096], target [...]
        criterion.linear.weight = embedding.weight  # a tied head

    Args:
        in_features, num_classes, bias, device, dtype: of `.linear`.
        out_features: (d1, ..., dK) of a K-dimensional loss; `.linear` then has V d1 ... dK outputs.
        weight: class weights [V], kept as a buffer.
        logit_scale: a float; one that is learned is refused: keep it in your own module and call the
        function. Row weights go to the call: ``criterion(hidden, target, row_weight=...)``.
        The others are those of :func:`linear_cross_entropy`.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        weight: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float | None = None,
        z_loss: float = 0.0,
        workspace: int | None = None,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(logit_scale, Tensor):
            raise ArgumentTypeError(
                "logit_scale must be a float here, got a tensor, which this module would neither train nor "
                "save; keep it in a module of your own and call lowtide.linear_cross_entropy"
            )
        check_tensors({} if weight is None else {"weight": weight})
        if weight is not None and weight.shape != (num_classes,):
            raise ArgumentError(f"weight must have shape [{num_classes}], got {list(weight.shape)}")
        no_target = torch.zeros(0) if ignore_index is None else torch.zeros(0, dtype=torch.long)
        check_loss_options(no_target, None, reduction, ignore_index, label_smoothing, z_loss)
        outputs = num_classes * math.prod(out_features)
        self.linear = nn.Linear(in_features, outputs, bias=bias, device=device, dtype=dtype)
        self.logits_shape = (num_classes, *out_features)
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "workspace": workspace,
            "backend": backend,
        }

    if TYPE_CHECKING:  # nn.Module's returns Any

        def __call__(self, input: Tensor, target: Tensor, *, row_weight: Tensor | None = None) -> Tensor: ...

    def forward(self, input: Tensor, target: Tensor, *, row_weight: Tensor | None = None) -> Tensor:
        linear_weight, linear_bias = self.linear.weight, self.linear.bias
        check_tensors({"input": input})
        if input.dim() > 0 and input.shape[-1] != linear_weight.shape[-1]:
            raise ArgumentError(
                f"input must have shape [..., {linear_weight.shape[-1]}], in_features of this module, "
                f"got {list(input.shape)}"
            )
        if len(self.logits_shape) > 1:
            linear_weight = linear_weight.unflatten(0, self.logits_shape)
            linear_bias = None if linear_bias is None else linear_bias.unflatten(0, self.logits_shape)
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            weight=self.weight,
            row_weight=row_weight,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value is not None)
