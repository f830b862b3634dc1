"""Give the advice at the end of an error: what to do about arguments that do not fit.

Advice on a shape says what would make the call fit.
"""

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

# Advice for names of Liger, Cut Cross-Entropy, torch and model configs that are no arguments here.
INSTEAD_OF = {
    **dict.fromkeys(
        ("mask", "attention_mask", "loss_mask"), "set target to ignore_index (-100) where the mask is 0"
    ),
    **dict.fromkeys(("_input", "e", "hidden", "hidden_states"), "pass input"),
    **dict.fromkeys(("lin_weight", "c"), "pass linear_weight"),
    **dict.fromkeys(("label", "labels", "targets"), "pass target"),
    "bias": "pass linear_bias",
    **dict.fromkeys(("ce_weight", "class_weight"), "pass weight"),
    "lse_square_scale": "pass z_loss",
    "return_z_loss": "call lowtide.losses.z_loss, which is the z-loss alone",
    **dict.fromkeys(
        ("return_token_accuracy", "return_predicted_tokens"),
        "take argmax of lowtide.linear_log_probs",
    ),
    "use_token_scaling": "pass row_weight, the probabilities of the targets without gradient",
    **dict.fromkeys(("accum_dtype", "accum_e_fp32", "accum_c_fp32"), "pass nothing: sums are float32"),
    **dict.fromkeys(
        ("filter_eps", "filter_e_grad", "filter_c_grad", "impl"), "pass nothing: every gradient is exact"
    ),
    "return_lse": "take logsumexp of lowtide.linear_log_probs",
    "shift": "slice: input[:, :-1] and target[:, 1:]",
    "vocab_parallel_options": "pass group",
    **dict.fromkeys(
        ("options", "chunk_size", "num_chunks", "chunk_mem_const"), "pass workspace, a number of bytes"
    ),
    **dict.fromkeys(
        ("logit_softcap", "logit_softcapping", "final_logit_softcap", "final_logit_softcapping"),
        "pass softcap",
    ),
    "temperature": "pass logit_scale=1 / temperature",
    "num_items_in_batch": "pass normalizer",
    **dict.fromkeys(("size_average", "reduce"), "pass reduction"),
}
# `linear_log_probs` has no options of a loss.
INSTEAD_OF_IN_LOG_PROBS = INSTEAD_OF | {
    **dict.fromkeys(
        ("reduction", "size_average", "reduce", "row_weight", "use_token_scaling"),
        "weigh and sum the log_prob that it returns",
    ),
    **dict.fromkeys(("normalizer", "num_items_in_batch"), "divide what you make of the log_prob"),
    "average_log_prob": 'call lowtide.losses.sequence_log_probs with reduction="mean"',
    **dict.fromkeys(
        ("label_smoothing", "z_loss", "lse_square_scale", "weight", "ce_weight", "class_weight"),
        "call lowtide.linear_cross_entropy, which has it",
    ),
}
USAGE = "pass (input, linear_weight, target) in this order, and the rest by name, as linear_bias=..."
OTHERWISE = "pass one of {known}; lowtide.chunked_loss takes any loss"

CALL = "lowtide.linear_cross_entropy(input, linear_weight, target, ...)"
USAGE_OF_MODULE = (
    "it makes a head of its own: pass (in_features, num_classes) in this order, and the rest by name. For "
    f"the head of a model call {CALL}, which takes the other arguments of this module"
)
USAGE_OF_FORWARD = (
    "pass (input, target): the weight is the module's own, .linear.weight. For the head of a model call "
    f"{CALL}"
)
INSTEAD_OF_IN_FORWARD = {
    **{name: sentence for name, sentence in INSTEAD_OF.items() if sentence in ("pass input", "pass target")},
    **dict.fromkeys(("lin_weight", "linear_weight"), f"set .linear.weight, or call {CALL}"),
    **dict.fromkeys(("bias", "linear_bias"), "make the module with bias=True"),
    "num_items_in_batch": "pass normalizer",
}

INPUT_FIRST = "; input comes first: pass (input, linear_weight, target)"


def for_weight(names: tuple[str, str], input: Tensor, linear_weight: Tensor) -> str:
    """Advise on a weight that has another number of features than the input."""
    if linear_weight.dim() == 2 and linear_weight.shape[0] == input.shape[-1]:
        # Either weight.T was passed, or logits were passed as input.
        return (
            f"; {names[0]} is what goes into the head, not its logits, and {names[1]} the weight of a "
            "torch.nn.Linear as it is, without .T"
        )
    return f"; pass the weight of the head that {names[0]} goes into, as torch.nn.Linear has it"


def for_target(input: Tensor, linear_weight: Tensor, target: Tensor, expected: Sequence[int]) -> str:
    """Advise on a target whose shape is not `expected`; its dtype says what it holds."""
    given, expected = list(target.shape), list(expected)
    rows = list(linear_weight.shape[:-1])  # the shape of the rows, if the input was passed as linear_weight
    if input.dim() == 2 and given == (
        [*rows, input.shape[0]] if target.is_floating_point() and len(given) > len(rows) else rows
    ):
        return INPUT_FIRST
    probabilities = [*expected, linear_weight.shape[0]] if target.is_floating_point() else expected
    for shape in (expected, probabilities):
        if target.numel() == math.prod(shape) and _same_order(given, shape):
            return f"; pass target.reshape({', '.join(map(str, shape)) or '()'})"
    if target.dim() == 2 and given[::-1] == expected:
        return "; pass target.T, as the first dimension of input is the target's second"
    if input.dim() == 2 and not target.is_floating_point() and target.numel() == math.prod(rows):
        return INPUT_FIRST
    if linear_weight.dim() > 2:
        return "; it goes with each row of input and each position of linear_weight"
    return "; slice input and target alike, e.g. hidden[:, :-1] and tokens[:, 1:]"


def _same_order(given: Sequence[int], expected: Sequence[int]) -> bool:
    """Return True if a reshape from `given` to `expected` keeps the rows in order.

    To see this, sizes of 1 and equal last sizes are left out. Then one of the two shapes must have
    at most one size.
    """
    one, other = ([n for n in shape if n != 1] for shape in (given, expected))
    while one and other and one[-1] == other[-1]:
        one.pop(), other.pop()
    return min(len(one), len(other)) < 2


def for_class(value: int) -> str:
    """Advise on an entry of a target that is no class."""
    if value < 0:
        return f"; pass ignore_index={value} if these rows are not to count"
    advice = "; the head may have fewer classes than the tokenizer"
    if dist.is_available() and dist.is_initialized():
        advice += "; pass group= if the weight is a rank's part of a divided head"
    return advice
