"""Say what to pass in place of arguments that other packages' losses have."""

POLICY = {
    **dict.fromkeys(("per_token_logps", "log_probs", "logps", "log_prob"), "pass policy"),
    **dict.fromkeys(
        ("old_per_token_logps", "old_log_probs", "old_logps", "old_log_prob"),
        "pass old, the second argument",
    ),
    **dict.fromkeys(
        ("ref_per_token_logps", "ref_log_probs", "ref_logps", "ref_log_prob", "ref"), "pass reference"
    ),
    **dict.fromkeys(("completion_mask", "attention_mask", "response_mask"), "pass mask"),
    **dict.fromkeys(("kl_coef", "kl_beta", "kl_loss_coef"), "pass beta"),
    **dict.fromkeys(
        ("epsilon_low", "clip_eps", "clip_epsilon", "clip_ratio", "clip_ratio_low", "clip_range", "eps"),
        "pass epsilon",
    ),
    **dict.fromkeys(("clip_ratio_high", "clip_eps_high", "eps_high"), "pass epsilon_high"),
    "temperature": "pass logit_scale=1 / temperature to linear_log_probs, which makes policy",
    "reduction": 'pass loss_type, which says how tokens are averaged ("grpo", "dapo" or "dr_grpo")',
    "use_ref_model": "pass reference, or leave it out",
    "delta": "leave it out: the ratio has no bound where the advantage is negative",
}
USAGE_OF_POLICY = (
    "pass (policy, old, advantages, mask); old=None stands for one step per sample, "
    "and torch.ones_like(policy) for a mask of all tokens"
)

_PAIRS = {
    **dict.fromkeys(("policy_chosen_logps", "chosen_logps"), "pass policy_chosen"),
    **dict.fromkeys(("policy_rejected_logps", "rejected_logps"), "pass policy_rejected"),
    "loss_type": "call dpo, simpo, orpo or kto, one function a loss",
    "ignore_index": "pass ignore_index to sequence_log_probs, which makes policy_chosen",
}
_CHOSEN = ("reference_chosen_logps", "ref_chosen_logps")
_REJECTED = ("reference_rejected_logps", "ref_rejected_logps")
_NO_REFERENCE = dict.fromkeys(
    ("reference_chosen", "reference_rejected", *_CHOSEN, *_REJECTED, "use_ref_model"),
    "leave it out: there is no reference",
)
DPO = _PAIRS | {
    **dict.fromkeys(_CHOSEN, "pass reference_chosen"),
    **dict.fromkeys(_REJECTED, "pass reference_rejected"),
    "average_log_prob": 'pass reduction="mean" to sequence_log_probs, which makes policy_chosen',
    **dict.fromkeys(
        ("compute_nll_loss", "alpha", "rpo_alpha"),
        "add the term yourself, as from sequence_log_probs of the chosen sequences",
    ),
    **dict.fromkeys(("gamma", "simpo_gamma", "gamma_beta_ratio"), "call simpo, which has a margin"),
    "use_ref_model": "call simpo or orpo, which need no reference",
}
SIMPO = (
    _PAIRS
    | _NO_REFERENCE
    | {
        "simpo_gamma": "pass gamma",
        "gamma_beta_ratio": "pass gamma, which is beta times this ratio",
        "label_smoothing": "call dpo, which has it",
        **dict.fromkeys(
            ("compute_nll_loss", "alpha", "cpo_alpha"), "call orpo, which has such a term, or add it yourself"
        ),
        "average_log_prob": 'pass reduction="mean" to sequence_log_probs, which makes policy_chosen',
    }
)
ORPO = (
    _PAIRS
    | _NO_REFERENCE
    | {
        "compute_nll_loss": "leave it out: the loss has this term",
        "alpha": "pass beta, the weight of the other term",
        "average_log_prob": 'pass reduction="mean" to sequence_log_probs, which makes policy_chosen',
    }
)
USAGE_OF_DPO = (
    "pass (policy_chosen, policy_rejected, reference_chosen, reference_rejected), each of shape [B]; "
    "simpo and orpo need no reference"
)
USAGE_OF_PAIRS = "pass (policy_chosen, policy_rejected), each of shape [B]"

KTO = {
    **dict.fromkeys(("policy_logps", "policy_log_probs"), "pass policy"),
    **dict.fromkeys(("reference_logps", "ref_logps"), "pass reference"),
    **dict.fromkeys(("labels", "preference_labels", "is_desirable"), "pass label, True where desirable"),
    "KL": "pass kl",
    "loss_type": _PAIRS["loss_type"],
    "ignore_index": "pass ignore_index to sequence_log_probs, which makes policy",
    "average_log_prob": 'pass reduction="mean" to sequence_log_probs, which makes policy',
}
USAGE_OF_KTO = "pass (policy, reference, label, kl); kl is a number, or a tensor of one dimension"

_SCALE = {
    "temperature": "pass logit_scale=1 / temperature",
    "scale": "pass logit_scale",
    "logit_bias": "leave it out: a bias of all logits changes nothing",
}
INFO_NCE = _SCALE | {
    **dict.fromkeys(("negatives", "negative_keys"), "append them to key, behind its first B rows"),
    **dict.fromkeys(("positive_key", "positive_keys"), "pass key, whose row i belongs to row i of query"),
}
USAGE_OF_INFO_NCE = "pass (query, key, logit_scale=...)"
CONTRASTIVE = _SCALE | {
    **dict.fromkeys(("image_features", "image_embeds"), "pass image"),
    **dict.fromkeys(("text_features", "text_embeds"), "pass text"),
}
USAGE_OF_CONTRASTIVE = "pass (image, text, logit_scale=...)"
