"""Language models of the installed transformers, as small as their configurations allow, with random weights:
nothing is downloaded. And one training step of each.

Shapes: B sequences, T tokens, V vocabulary.
"""

import contextlib
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from tests.deferred.helpers import norm, within_eager

B, T, V = 2, 12, 99
MOST_PARAMETERS = 6_000_000

MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

# What configurations call the same things; each gets those that it has.
SIZES = {
    V: "vocab_size decoder_vocab_size",
    32: "hidden_size n_embd d_model embed_dim dim emb_dim word_embed_proj_dim",
    48: "intermediate_size ffn_dim ffn_hidden_size n_inner d_ff encoder_ffn_dim decoder_ffn_dim "
    "moe_intermediate_size shared_expert_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_local_experts num_experts n_routed_experts moe_num_experts sliding_window state_size time_step_rank",
    8: "head_dim d_kv attention_head_dim v_head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim "
    "mamba_n_heads mamba_d_head n_mamba_heads",
    16: "kv_lora_rank q_lora_rank qk_head_dim",
    64: "mamba_d_ssm n_positions max_position_embeddings max_seq_len",
    1: "n_groups bos_token_id",
    0: "pad_token_id decoder_start_token_id",
}


class NotSmall(Exception):
    """The model could not be built small by these means, or does not run then."""


def everything() -> list[str]:
    """The names of all classes."""
    names = (name for mapping in MAPPINGS for name in mapping.values())
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def build(name: str, **options: Any) -> nn.Module:
    kind = getattr(transformers, name)
    config = kind.config_class()
    for size, fields in SIZES.items():
        for field in fields.split():
            if hasattr(config, field) or field == "decoder_start_token_id":
                set_quietly(config, field, size)
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        set_quietly(config, "layer_types", (kinds * 2)[:2])
    if getattr(config, "kv_lora_rank", None):  # whose key heads are as many as the query heads
        set_quietly(config, "num_key_value_heads", config.num_attention_heads)
    set_quietly(config, "use_cache", False)
    set_quietly(config, "_experts_implementation", "eager")  # in any dtype
    if "CausalLM" in name or "LMHead" in name:
        set_quietly(config, "is_decoder", True)
    for field, value in options.items():
        setattr(config, field, value)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in kind(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise NotSmall(f"{parameters / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for field in ("dropout", "attn_dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, 0.0)
    return model


def set_quietly(config: Any, field: str, value: object) -> None:
    with contextlib.suppress(AttributeError, ValueError, TypeError):  # computed from others, or by layer
        setattr(config, field, value)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, V, (B, T), generator=generator)
    labels = tokens.clone()
    labels[:, :2] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model: nn.Module) -> dict[str, Tensor]:
    """The loss and the gradient of each parameter, by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    loss = model(**batch()).loss
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


def check(
    found: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Each within twice eager's error and a rounding. In float32 the rounding is that of all gradients, as
    some are 0 but for it, and a few of the loss, which eager may have right by luck; in bfloat16 its own."""
    assert found.keys() == eager.keys()
    whole = sum(norm(each) ** 2 for name, each in exact.items() if name != "loss") ** 0.5
    for name, ours in found.items():
        size = 8 * norm(ours) if name == "loss" else whole
        if dtype == torch.bfloat16:
            size = norm(exact[name])
        within_eager(ours, eager[name], exact[name], dtype, size=size)
