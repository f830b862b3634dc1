"""Define the public functions of distillation. Their docstrings are the contract.

The docstring of `forward_kl` says what all three functions share.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from lowtide.core.autodiff import in_transform
from lowtide.core.errors import advises
from lowtide.core.fsdp import breaks_graph, expect_gradients, uncompiled
from lowtide.ops.distillation import autograd, higher_order
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.distillation.sharding import own_heads
from lowtide.ops.distillation.validation import check_beta, check_heads, check_options
from lowtide.ops.linear_cross_entropy.definition.head import Reduction
from lowtide.ops.linear_cross_entropy.sharding import Division, telling_errors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Advice for arguments of Liger's losses and of lowtide's own, which these functions do not have.
INSTEAD_OF = {
    **dict.fromkeys(
        ("shift_labels", "labels", "true_labels", "target", "ignore_index"), "pass ignored=labels == -100"
    ),
    **dict.fromkeys(("mask", "attention_mask", "loss_mask"), "pass ignored, True where the mask is 0"),
    **dict.fromkeys(("weight", "linear_weight", "lin_weight"), "pass student_weight and teacher_weight"),
    **dict.fromkeys(("bias", "linear_bias"), "pass student_bias and teacher_bias"),
    "softcap": "pass student_softcap and teacher_softcap",
    **dict.fromkeys(("row_weight", "normalizer"), 'pass reduction="none", and weigh or divide the result'),
    "logit_scale": "multiply student_input or teacher_input by it",
    "T": "pass temperature",
}
USAGE = (
    "pass (student_input, student_weight, teacher_input, teacher_weight) in this order, and the rest by "
    "name; labels say what is left out: ignored=labels == -100"
)


@advises(INSTEAD_OF, USAGE)
def forward_kl(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignored: Tensor | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    workspace: int | None = None,
    group: "ProcessGroup | None" = None,
    first_class: int | None = None,
    num_classes: int | None = None,
    tokens_sharded: bool = False,
) -> Tensor:
    r"""Compute KL(teacher ‖ student) of two heads over the same classes, without their logits.

    Example::

        with torch.no_grad():
            teacher_hidden = teacher.model(tokens).last_hidden_state
        hidden = student.model(tokens).last_hidden_state
        loss = forward_kl(
            hidden,
            student.lm_head.weight,
            teacher_hidden,
            teacher.lm_head.weight,
            ignored=labels == -100,
        )

    The student's logits are :math:`z = W_s x_s + b_s`, and :math:`s = \log\mathrm{softmax}(z / T)`
    are its log-probabilities. Those of the teacher, t, are defined likewise. The loss of a row and
    its gradient with respect to z are

    .. math::
        L = \sum_v e^{t_v} (t_v - s_v), \qquad
        \frac{\partial L}{\partial z_v} = \frac{e^{s_v} - e^{t_v}}{T}.

    The teacher is a constant: its tensors get no gradient, whether they require one or not.
    (Teachers are often run under ``no_grad`` with parameters that were never frozen. In
    self-distillation the teacher's weight is the student's. If such calls raised an error, it would
    only ask for a ``detach()``.)

    `temperature` divides both heads' logits and does nothing else. To keep the size of gradients as
    T grows, multiply by T² yourself: ``T**2 * forward_kl(..., temperature=T)`` (Hinton,
    arxiv.org/abs/1503.02531).

    A bias of -inf excludes a class from a head. (A soft cap c would turn this logit into -c.) A
    class that the teacher excludes adds 0 to the loss. A class that only the student excludes makes
    the loss infinite.

    Shapes:
        student_input [..., D_s], student_weight [V, D_s], student_bias [V], teacher_input
        [..., D_t], teacher_weight [V, D_t], teacher_bias [V], ignored [...]; the result is 0-d, or
        [...] for ``reduction="none"``. Any strides are accepted; a shifted slice such as
        ``hidden[:, :-1]`` is not copied as a whole.

    Args:
        student_softcap, teacher_softcap: the soft cap c of a head whose logits are
            :math:`c \tanh(u / c)` with :math:`u = W x + b` (Gemma 2: 30); None for none. The
            temperature divides the capped logits. The student's gradient includes the slope of the
            cap, :math:`1 - \tanh^2(u / c)`. There is no option for a head's own logit scale:
            multiply input and bias by it.
        ignored: a bool tensor. Rows where it is True do not count, even if their input holds NaN.
        temperature: T, above 0.
        reduction: `"sum"` adds up the losses of the rows, `"mean"` divides this sum by the number
            of rows that count, and `"none"` returns the losses of the rows. If no row counts, the
            mean is NaN and its gradients are zero, as in torch's cross entropy.
        workspace: bytes that the call may hold beyond inputs, the loss and the gradients. None is
            the default below. An explicit workspace may have no room for the float32 sum of the
            student weight's gradient. Unless a single product forms this gradient (see `Memory`),
            it is then formed class block by class block, which takes two more products. Not
            counted are, on CUDA, the cast copies that autocast makes too, and copies of operands
            that GEMMs read slowly, as in :func:`lowtide.linear_cross_entropy`.
        group, first_class, num_classes, tokens_sharded: for heads whose classes are divided over
            ranks, as in :func:`lowtide.linear_cross_entropy`. Student and teacher are divided
            alike. The weights are DTensors with placement Shard(0), or this rank's rows with
            `group`. A student's head of :func:`lowtide.shard_head` needs none of these arguments.
            The teacher's head is then one of `shard_head` too, or a plain weight of all classes,
            the same on each rank.

    Default workspace:
        64 MiB. On CUDA it is 1 GiB plus the float32 sum of a half-precision student weight's
        gradient (4 V D_s bytes, held from forward to backward). The default is limited to what the
        dense computation would hold in the same dtype: four tensors of the logits' size less the
        gradients, or three where no gradient is wanted. The call may hold 4 MiB (64 MiB on CUDA)
        beyond this limit, and 128 bytes (256 on CUDA) for each row, feature and class. The limit
        does not apply to compiled graphs and derivatives of higher order.

    Precision:
        Products take their operands in the input's dtype (autocast's under autocast; float32 for
        half precision on the CPU, but for heads of 2^16 bfloat16 weights or more where the CPU has
        units for bfloat16 and there is a C++ compiler). Their sums, the logits, the loss and the
        sum of the weight's gradient are float32; float64 stays float64. The gradient of the logits
        is computed in float32 and rounded once to the dtype of the operands. Each result is rounded
        once. The student's input gradient for mean and sum is rounded twice if the upstream
        gradient is not a power of two.
        Student and teacher may differ in dtype, but if one of them is float64, both are. The loss
        is float32, or float64 for float64.
        If the student is close to its teacher, the loss has a smaller error than one computed from
        dense log-probabilities. The latter has the rounding error of the normalizers and is often
        negative. The error of a KL divergence here is a few 1e-8. Jensen-Shannon keeps its digits
        and its sign, however close to 0 it is.

    Memory:
        The call holds O(workspace): it works on a chunk of rows at a time. On CUDA with a
        half-precision weight, and on a CPU with units for bfloat16 with a bfloat16 one and at most
        V / 2 rows, a single product forms the weight's gradient if the workspace has room for the
        half-precision gradient of all of the student's logits. The logits lie in the memory of the
        weight's gradient before. On CUDA they may have memory of their own, where the workspace has
        room for both heads' float32 logits of all rows. By default this is so only where the dense
        computation, and what the call may hold beyond it, is as much. For mean and sum, forward
        forms the gradients (four products) and holds them until backward. For none, backward
        computes the logits again (six products). Without gradients only the loss is computed (two
        products).
        On CUDA, one Triton kernel computes the row statistics from both heads' logits, and another
        one computes the gradient. Without Triton, and for float64, plain torch computes both.
        With ``retain_graph=True``, and under torch.compile, the gradients exist twice in backward.
        Derivatives of higher order, forward mode and vmap differentiate the definition chunk by
        chunk. They hold O(workspace) as well, and copies of the operands in the dtype of the sums.
        They are exact, but not fast.
        If the classes are divided over ranks, the ranks gather six numbers a row (two more for
        Jensen-Shannon) and sum the student's input gradient, chunk by chunk. Two chunks of logits
        exist at a time. Such heads have first derivatives by backward alone.

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices and options that do not fit, or a
            workspace too small for one row. Each is also a RuntimeError, which torch raises for
            most of these.

    Source: Hinton et al., arxiv.org/abs/1503.02531.
    """
    student = student_input, student_weight, student_bias
    teacher = teacher_input, teacher_weight, teacher_bias
    options = DistillationOptions(0.0, temperature, reduction, workspace, student_softcap, teacher_softcap)
    division = Division(group, first_class, num_classes, tokens_sharded)
    return _divergence(Heads(*student, *teacher, ignored), options, division)


@advises(INSTEAD_OF, USAGE)
def reverse_kl(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignored: Tensor | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    workspace: int | None = None,
    group: "ProcessGroup | None" = None,
    first_class: int | None = None,
    num_classes: int | None = None,
    tokens_sharded: bool = False,
) -> Tensor:
    r"""Compute KL(student ‖ teacher) of two heads over the same classes, without their logits.

    Example::

        loss = reverse_kl(hidden, student.lm_head.weight, teacher_hidden, teacher.lm_head.weight)

    .. math::
        L = \sum_v e^{s_v} (s_v - t_v), \qquad
        \frac{\partial L}{\partial z_v} = \frac{e^{s_v} (s_v - t_v - L)}{T}

    A class that the student excludes adds 0 to the loss. A class that only the teacher excludes
    makes the loss infinite and the gradient NaN.

    Shapes, arguments, precision, memory and errors are those of :func:`forward_kl`.

    Source: MiniLLM, arxiv.org/abs/2306.08543.
    """
    student = student_input, student_weight, student_bias
    teacher = teacher_input, teacher_weight, teacher_bias
    options = DistillationOptions(1.0, temperature, reduction, workspace, student_softcap, teacher_softcap)
    division = Division(group, first_class, num_classes, tokens_sharded)
    return _divergence(Heads(*student, *teacher, ignored), options, division)


@advises({**INSTEAD_OF, "jsd_beta": "pass beta"}, USAGE)
def jensen_shannon(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float = 0.5,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    ignored: Tensor | None = None,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    workspace: int | None = None,
    group: "ProcessGroup | None" = None,
    first_class: int | None = None,
    num_classes: int | None = None,
    tokens_sharded: bool = False,
) -> Tensor:
    r"""Compute the generalised Jensen-Shannon divergence of two heads, without their logits.

    Example::

        loss = jensen_shannon(
            hidden, student.lm_head.weight, teacher_hidden, teacher.lm_head.weight, beta=0.1
        )

    With the mixture :math:`e^{m} = \beta e^{t} + (1-\beta) e^{s}`,

    .. math::
        L = \beta\, \mathrm{KL}(t \,\|\, m) + (1-\beta)\, \mathrm{KL}(s \,\|\, m), \qquad
        \frac{\partial L}{\partial z_v}
            = \frac{1-\beta}{T}\, e^{s_v} \bigl(s_v - m_v - \mathrm{KL}(s \,\|\, m)\bigr).

    Args:
        beta: a number above 0 and below 1. With 1/2 the loss is the Jensen-Shannon divergence, at
            most log 2. As beta tends to 0, L / beta tends to KL(teacher ‖ student). As beta tends
            to 1, L / (1 - beta) tends to KL(student ‖ teacher). At 0 and 1 themselves L is 0, so
            these values raise an error: call `forward_kl` or `reverse_kl`. (Some trainers let 0 and
            1 stand for these two divergences, which makes the loss jump there.)

    The loss is finite even if one head excludes a class. Shapes, other arguments, precision,
    memory and errors are those of :func:`forward_kl`.

    Source: GKD, arxiv.org/abs/2306.13649, where P is the teacher and Q the student.
    """
    student = student_input, student_weight, student_bias
    teacher = teacher_input, teacher_weight, teacher_bias
    options = DistillationOptions(beta, temperature, reduction, workspace, student_softcap, teacher_softcap)
    division = Division(group, first_class, num_classes, tokens_sharded)
    return _divergence(Heads(*student, *teacher, ignored), options, division, mixes=True)


def _divergence(
    heads: Heads, options: DistillationOptions, division: Division, *, mixes: bool = False
) -> Tensor:
    """Check a call and compute its divergence; `mixes` is True for Jensen-Shannon."""
    if breaks_graph(*heads):
        return uncompiled(_divergence, heads, options, division, mixes=mixes)  # type: ignore[no-any-return]
    tensors = {"linear_weight": heads.student_weight, "input": heads.student_input}
    with telling_errors(tensors, division.group):
        if mixes:
            check_beta(options.beta)
        own, shard, returned = own_heads(heads, division)
        check_heads(own, divided=shard is not None)
        check_options(options)
        own, options = own.detached_teacher(), options.of(own, shard)
        if in_transform(*own):
            autograd.refuse_divided(options)
            return higher_order.distillation(own, options)
        loss = autograd.distillation(own, options)
    expect_gradients((heads.student_weight, heads.student_bias), loss)
    return returned(loss, options.reduction)
