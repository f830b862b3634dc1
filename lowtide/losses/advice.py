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
        ("epsilon_low", "clip_eps", "clip_epsilon", "clip_ratio", "clip_range", "eps"), "pass epsilon"
    ),
    **dict.fromkeys(("clip_ratio_high", "clip_eps_high", "eps_high"), "pass epsilon_high"),
    "temperature": "pass logit_scale=1 / temperature to linear_log_probs, which makes policy",
    "reduction": 'pass loss_type, which says how tokens are averaged ("grpo", "dapo" or "dr_grpo")',
    "use_ref_model": "pass reference, or leave it out",
}
USAGE_OF_POLICY = (
    "pass (policy, old, advantages, mask); old=None stands for one step per sample, "
    "and torch.ones_like(policy) for a mask of all tokens"
)

PREFERENCE = {
    **dict.fromkeys(("policy_chosen_logps", "chosen_logps"), "pass policy_chosen"),
    **dict.fromkeys(("policy_rejected_logps", "rejected_logps"), "pass policy_rejected"),
    **dict.fromkeys(("reference_chosen_logps", "ref_chosen_logps"), "pass reference_chosen"),
    **dict.fromkeys(("reference_rejected_logps", "ref_rejected_logps"), "pass reference_rejected"),
    "loss_type": "call dpo, simpo, orpo or kto, one function a loss",
    "average_log_prob": 'pass reduction="mean" to sequence_log_probs, which makes policy_chosen',
    "ignore_index": "pass ignore_index to sequence_log_probs, which makes policy_chosen",
    "simpo_gamma": "call simpo with gamma",
    "gamma_beta_ratio": "pass gamma, which is beta times this ratio",
    "alpha": "subtract the mean of policy_chosen, weighed by it, from the loss",
    "compute_nll_loss": "subtract the mean of policy_chosen from the loss",
    "use_ref_model": "call simpo or orpo, which need no reference model",
}
USAGE_OF_DPO = (
    "pass (policy_chosen, policy_rejected, reference_chosen, reference_rejected), each of shape [B]; "
    "simpo and orpo need no reference model"
)
USAGE_OF_PAIRS = "pass (policy_chosen, policy_rejected), each of shape [B]"

KTO = {
    **dict.fromkeys(("policy_logps", "policy_log_probs"), "pass policy"),
    **dict.fromkeys(("reference_logps", "ref_logps"), "pass reference"),
    **dict.fromkeys(("labels", "preference_labels", "is_desirable"), "pass label, True where desirable"),
    "KL": "pass kl",
    "average_log_prob": PREFERENCE["average_log_prob"].replace("policy_chosen", "policy"),
}
USAGE_OF_KTO = "pass (policy, reference, label, kl); kl is a number, or a tensor of one"

EMBEDDINGS = {
    "temperature": "pass logit_scale=1 / temperature",
    **dict.fromkeys(("scale", "logit_bias"), "pass logit_scale; there is no bias of the logits"),
    **dict.fromkeys(("negatives", "negative_keys"), "append them to key, behind its first B rows"),
    **dict.fromkeys(("image_features", "image_embeds"), "pass image"),
    **dict.fromkeys(("text_features", "text_embeds"), "pass text"),
}
USAGE_OF_INFO_NCE = "pass (query, key, logit_scale=...)"
USAGE_OF_CONTRASTIVE = "pass (image, text, logit_scale=...)"
