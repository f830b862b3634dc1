"""Say what to write in place of the names that xformers' masks have and these masks lack."""

BY_ITSELF = "a mask goes to the device of the tensors by itself"
NOTHING = f"pass nothing: {BY_ITSELF}"
INSTEAD_OF = {
    "to": f"leave it out: {BY_ITSELF}",
    "make_local_attention": "pass a causal mask, and window=(window_size - 1, 0) beside it",
    "make_causal_from_bottomright": "pass window=(-1, 0) beside the mask",
    "make_local_attention_from_bottomright": "pass window=(window_size - 1, 0) beside the mask",
    **dict.fromkeys(
        ("from_tensor_lists_qk", "from_tensor_lists_qkv"),
        "call BlockDiagonalMask.from_seqlens(lengths of q, lengths of k), and torch.cat(..., 1) of each list",
    ),
    "q_seqinfo": "read q_starts",
    "k_seqinfo": "read k_starts",
}
