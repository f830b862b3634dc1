"""The public functions. Their docstrings are the contract; what all three share is said in `forward_kl`."""

from torch import Tensor

from lowtide.core.autodiff import active
from lowtide.ops.distillation import autograd, higher_order
from lowtide.ops.distillation.heads import Heads, Options, Reduction
from lowtide.ops.distillation.validation import check_beta, check_heads, check_options


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
) -> Tensor:
    r"""Compute KL(teacher ‖ student) of two heads over the same classes, without the logits of either.

    Example::

        with torch.no_grad():
            teacher_hidden = teacher.model(tokens).last_hidden_state
        hidden = student.model(tokens).last_hidden_state
        loss = forward_kl(
            hidden, student.lm_head.weight, teacher_hidden, teacher.lm_head.weight, ignored=labels == -100
        )

    With :math:`s = \log\mathrm{softmax}((W_s x_s + b_s) / T)` of the student, t likewise of the teacher, the
    loss of a row and its gradient by the student's logits are

    .. math::
        L = \sum_v e^{t_v} (t_v - s_v), \qquad \frac{\partial L}{\partial z_v} = \frac{e^{s_v} - e^{t_v}}{T}.

    The teacher is a constant: its tensors get no gradient, whether they require one or not. (Teachers are
    often run under ``no_grad`` with parameters that were never frozen, and in self-distillation the teacher's
    weight is the student's; an error there would only ask for a ``detach()``.)

    `temperature` divides both heads' logits and does nothing else. To keep the size of gradients as T grows,
    multiply by T² yourself: ``T**2 * forward_kl(..., temperature=T)`` (Hinton, arxiv.org/abs/1503.02531).

    Shapes:
        student_input [..., D_s], student_weight [V, D_s], student_bias [V], teacher_input [..., D_t],
        teacher_weight [V, D_t], teacher_bias [V], ignored [...]; the result is 0-d, or [...] for
        ``reduction="none"``. Any strides; a shifted slice, ``hidden[:, :-1]``, is not copied as a whole.

    Args:
        student_softcap, teacher_softcap: c of a head whose logits are :math:`c \tanh(u / c)` (Gemma 2: 30),
            which the temperature then divides; None for none. The student's gradient takes the slope,
            :math:`1 - \tanh^2(u / c)`. A head's own logit scale is no option: multiply
            input and bias by it.
        ignored: bool; rows where it is True count for nothing, whatever their input holds, NaN included.
        temperature: T, above 0.
        reduction: `"sum"` adds the rows up, `"mean"` divides that by the number of rows that count. (With
            none that counts: NaN, and gradients of zero, as in torch's cross entropy.)
        workspace: bytes that the call may hold beyond inputs, the loss and the gradients. None is 64 MiB on
            the CPU; on CUDA 1 GiB and, beside it, the float32 sum of a half-precision student weight's
            gradient (4 V D_s bytes, from forward to backward). But for compiled graphs and derivatives of
            higher order, None is no more than dense logits of both heads would take in the same dtype, 64 KiB
            (128 on CUDA) and 64 bytes (256) for each row, feature and class aside. Where that sum does
            not fit an explicit workspace, the gradient is formed class block by class block, for two more
            products. Not counted: on CUDA under autocast, one copy of each weight of another dtype, like
            autocast's own.

    Precision:
        Products take their operands in the input's dtype (autocast's under autocast; float32 for half
        precision on the CPU) and are summed in float32, as are the logits, the loss and the gradient of the
        weight; float64 stays float64. The gradient of the logits is formed in float32 and rounded once to the
        dtype of the products. Each result is rounded once, the student's input gradient for mean and sum
        twice if the upstream gradient is no power of two. Student and teacher may differ in dtype; the loss
        is float32, or float64 if both are. A student close to its teacher has a loss closer to the truth than
        that of dense logits, which carries the rounding of the normalisers (and is often negative): an error
        of a few 1e-8 for the KL divergences, and digits and sign to the end for Jensen-Shannon.

        A class that one head excludes (a bias of -inf, which a soft cap would make -c) adds nothing where its
        probability weighs the term.
        Where the teacher gives mass to a class that the student excludes, the loss is infinite.

    Memory:
        O(workspace), never N V: a chunk of rows at a time. For mean and sum the gradients are formed in
        forward (four products) and held until backward; for none, backward recomputes the logits (six
        products). Without gradients only the loss is computed (two). On CUDA the pass over both heads'
        logits is one Triton kernel for the statistics and one for the gradient; without Triton, and in
        float64, plain torch. With ``retain_graph=True`` (and under torch.compile) the gradients exist twice
        in backward. Derivatives of higher order, forward mode and vmap differentiate the definition chunk by
        chunk: O(workspace) as well, beside copies of the operands in the dtype of the sums; exact, not fast.

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices and options that do not fit, or a workspace below
            one row. Each is also a RuntimeError, which is what torch raises for most of these.
    """
    student, teacher = (
        (student_input, student_weight, student_bias),
        (teacher_input, teacher_weight, teacher_bias),
    )
    options = Options(0.0, temperature, reduction, workspace, student_softcap, teacher_softcap)
    return _divergence(Heads(*student, *teacher, ignored), options)


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
) -> Tensor:
    r"""Compute KL(student ‖ teacher) of two heads over the same classes, without the logits of either.

    Example::

        loss = reverse_kl(hidden, student.lm_head.weight, teacher_hidden, teacher.lm_head.weight)

    .. math::
        L = \sum_v e^{s_v} (s_v - t_v), \qquad
        \frac{\partial L}{\partial z_v} = \frac{e^{s_v} (s_v - t_v - L)}{T}

    Everything else is as in :func:`forward_kl`, but for the class that is excluded: where the student gives
    mass to a class that the teacher excludes, the loss is infinite, and its gradient NaN.

    Source: MiniLLM, arxiv.org/abs/2306.08543.
    """
    student, teacher = (
        (student_input, student_weight, student_bias),
        (teacher_input, teacher_weight, teacher_bias),
    )
    options = Options(1.0, temperature, reduction, workspace, student_softcap, teacher_softcap)
    return _divergence(Heads(*student, *teacher, ignored), options)


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
) -> Tensor:
    r"""Compute the generalised Jensen-Shannon divergence of two heads, without the logits of either.

    Example::

        loss = jensen_shannon(
            hidden, student.lm_head.weight, teacher_hidden, teacher.lm_head.weight, beta=0.1
        )

    With the mixture :math:`e^{m} = \beta e^{t} + (1-\beta) e^{s}`,

    .. math::
        L = \beta\, \mathrm{KL}(t \,\|\, m) + (1-\beta)\, \mathrm{KL}(s \,\|\, m), \qquad
        \frac{\partial L}{\partial z_v}
            = \frac{1-\beta}{T}\, e^{s_v} \bigl(s_v - m_v - \mathrm{KL}(s \,\|\, m)\bigr).

    beta = 1/2 is the Jensen-Shannon divergence, at most log 2. Towards 0, L / beta tends to
    KL(teacher ‖ student); towards 1, L / (1 - beta) tends to KL(student ‖ teacher). L itself vanishes at both
    ends, so they are not taken for beta: call `forward_kl` or `reverse_kl`. (Some trainers let 0 and 1 stand
    for those two, which makes the loss jump there.) It is finite even where one head excludes a class.

    Everything else is as in :func:`forward_kl`.

    Source: GKD, arxiv.org/abs/2306.13649, where P is the teacher and Q the student.
    """
    check_beta(beta)
    student, teacher = (
        (student_input, student_weight, student_bias),
        (teacher_input, teacher_weight, teacher_bias),
    )
    options = Options(beta, temperature, reduction, workspace, student_softcap, teacher_softcap)
    return _divergence(Heads(*student, *teacher, ignored), options)


def _divergence(heads: Heads, options: Options) -> Tensor:
    check_heads(heads)
    check_options(options)
    heads, options = heads.detached_teacher(), options.of(heads)
    if active(*heads):
        return higher_order.distillation(heads, options)
    return autograd.distillation(heads, options)
