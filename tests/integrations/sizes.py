"""Configurations of Transformers' models with as few and as small numbers as they allow."""

import dataclasses
import fnmatch
import inspect
from typing import Any

from transformers.configuration_utils import PretrainedConfig

V = 99  # vocabulary
IMAGE = 2  # a token that no text has
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}

# The names of configurations for the same sizes; each configuration gets those that it has.
SIZES = {
    V: "vocab_size decoder_vocab_size vocab_size_per_layer_input entity_vocab_size "
    "encoder_hash_byte_group_vocab",
    32: "hidden_size n_embd d_model embed_dim dim emb_dim word_embed_proj_dim embedding_size "
    "projection_dim *_hidden_size image_token_embed_dim *_hidden_dim *_output_dim projector_input_dim "
    "adapter_*_dim adapter_input_size d_latents output_dim hidden_dim num_position_embeddings "
    "codebook_dim linear_*_head_dim max_pos_emb",
    48: "intermediate_size ffn_dim ffn_hidden_size n_inner d_ff *_ffn_dim *_intermediate_size "
    "intermediate_size_mlp",
    2: "num_hidden_layers n_layer n_layers num_layers layers encoder_layers decoder_layers "
    "num_decoder_layers num_encoder_layers *_hidden_layers num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_topk depth num_res_blocks moe_k num_self_attends_per_block "
    "num_feedforward_networks num_blocks",
    4: "num_attention_heads attention_heads n_head n_heads num_heads *_attention_heads num_local_experts "
    "num_experts n_routed_experts moe_num_experts sliding_window state_size time_step_rank",
    8: "head_dim d_kv attention_head_dim v_head_dim rotary_dim qk_rope_head_dim qk_nope_head_dim "
    "index_head_dim mamba_n_heads mamba_d_head n_mamba_heads hidden_size_per_layer_input "
    "global_head_dim latent_channels base_channels num_embeddings codebook_size num_filters "
    "downsample_hidden_size indexer_head_dim",
    16: "kv_lora_rank q_lora_rank qk_head_dim hc_lowrank",
    64: "mamba_d_ssm n_positions max_position_embeddings max_seq_len image_size ngram_vocab_size_base",
    1: "n_groups n_group topk_group bos_token_id",
    0: "pad_token_id decoder_start_token_id",
}
PATTERNS = {pattern: size for size, patterns in SIZES.items() for pattern in patterns.split()}

# Options that only one class of configuration needs. Decoders that hide padding start with another
# token: the result of a query that sees no key depends on the implementation of attention.
OPTIONS: dict[str, dict[str, Any]] = {
    "Blip2Config": {"num_query_tokens": 2, "image_token_index": IMAGE},
    "BltGlobalTransformerConfig": {"hidden_size": 64},
    "BltLocalDecoderConfig": {"hidden_size_global": 64},
    "ChameleonConfig": {"vocabulary_map": {"<image>": IMAGE}},
    "ChameleonVQVAEConfig": {"base_channels": 32},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
    "Cosmos3EdgeTextConfig": {"rope_parameters": M_ROPE},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "DiaDecoderConfig": {"cross_num_key_value_heads": 4},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteTextConfig": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
    "Emu3Config": {"vocabulary_map": {"<image>": IMAGE}},
    "Emu3VQVAEConfig": {"base_channels": 32},
    "EncoderDecoderConfig": {"decoder_start_token_id": 1},
    "Ernie4_5_VLMoeTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    },
    "EsmcConfig": {"num_key_value_heads": 4},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "Gemma3nTextConfig": {"intermediate_size": 48, "num_kv_shared_layers": 0},
    "Glm4vMoeTextConfig": {"rope_parameters": M_ROPE | {"partial_rotary_factor": 1.0}},
    "Glm4vTextConfig": {"rope_parameters": M_ROPE},
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "GlmOcrTextConfig": {"rope_parameters": M_ROPE},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Granite4VisionConfig": {
        "vision_config": {"hidden_size": 64},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 0]],
    },
    "GraniteSpeechEncoderConfig": {"context_size": 8},
    "GraniteSpeechPlusEncoderConfig": {"context_size": 8, "cat_hidden_layers": None},
    "HunYuanVLTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}
    },
    "Inkling2TextConfig": {"swa_num_key_value_heads": 2},
    "InklingTextConfig": {"swa_num_key_value_heads": 2},
    "InklingVisionConfig": {"patch_size": 4, "num_hidden_layers": 4},
    "InstructBlipConfig": {"num_query_tokens": 2, "image_token_index": IMAGE},
    "InstructBlipVideoConfig": {"num_query_tokens": 2, "video_token_index": IMAGE},
    "JanusVQVAEConfig": {"base_channels": 32},
    "Kosmos2Config": {"latent_query_num": 2},
    "KyutaiSpeechToTextConfig": {
        "audio_pad_token_id": 3,
        "num_codebooks": 2,
        "codec_config": {"upsample_groups": 8},
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 8},
    "MobileBertConfig": {"embedding_size": 16},
    "Molmo2AdapterConfig": {"vision_feature_layer": [-1, -2]},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "MuseSparkAudioConfig": {"patch_sizes": (4, 2), "hidden_sizes": (16, 32), "depths": (1, 1)},
    "Nemotron3_5TranscribeWordTimestampConfig": {"blank_token_id": 98},
    "NeoMMEConfig": {"head_dim": 16},
    "PaddleOCRTextConfig": {"rope_parameters": M_ROPE},
    "Qwen2_5_VLTextConfig": {"rope_parameters": M_ROPE},
    "Qwen2_5OmniTextConfig": {"rope_parameters": M_ROPE},
    "Qwen2VLTextConfig": {"rope_parameters": M_ROPE},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "ReformerConfig": {"axial_pos_shape": (3, 4), "axial_pos_embds_dim": (16, 16)},
    "SpeechEncoderDecoderConfig": {"decoder_start_token_id": 1},
    "UnlimitedOcrTextConfig": {"num_key_value_heads": 4},
    "VibeVoiceAcousticTokenizerConfig": {"downsampling_ratios": (2, 2), "depths": (1, 1, 1)},
    "VibeVoiceAcousticTokenizerEncoderConfig": {"downsampling_ratios": (2, 2)},
    "VisionEncoderDecoderConfig": {"decoder_start_token_id": 1},
    "WhisperConfig": {"max_source_positions": 16},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "attention_hidden_size": 64,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "ZayaConfig": {"num_experts_per_tok": 1},
}


def small(config: PretrainedConfig, **options: Any) -> PretrainedConfig:
    """One of the same class, from its constructor, which computes what follows from sizes."""
    if dataclasses.is_dataclass(config):
        fields = [each.name for each in dataclasses.fields(config)]
    else:  # Transformers 4.
        fields = [*inspect.signature(type(config).__init__).parameters]
    options = OPTIONS.get(type(config).__name__, {}) | options
    sizes: dict[str, Any] = {
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "use_cache": False,
        "apply_spec_augment": False,
    }
    for field in fields:
        value, size = vars(config).get(field), size_of(field)
        if isinstance(value, PretrainedConfig):
            spec = getattr(type(config), "sub_configs_defaults", {}).get(field)  # newer than 5.17
            given = spec.init_kwargs if spec else {}
            kept = {name: each for name, each in given.items() if size_of(name) is None}
            options[field] = small(value, **(kept | options.get(field, {})))
        elif "drop" in field and isinstance(value, float):
            sizes[field] = 0.0
        elif size is not None and not isinstance(value, (bool, float, str)):
            sizes[field] = type(value)(size for _ in value) if isinstance(value, (list, tuple)) else size
    if vars(config).get("kv_lora_rank"):
        sizes["num_key_value_heads"] = PATTERNS["num_attention_heads"]
    layers = getattr(config, "num_hidden_layers", None)
    kinds = {
        field: list(dict.fromkeys(value))
        for field in fields
        if is_kinds(value := vars(config).get(field), layers)
    }
    layers = max(2, *(len(each) for each in kinds.values())) if kinds else 2
    for field in fields:
        if size_of(field) == 2 and field.endswith("layers"):
            sizes[field] = layers
    for field, each in kinds.items():
        sizes[field] = (each * layers)[:layers]
    return type(config)(**(sizes | options))


def is_kinds(value: object, layers: object) -> bool:
    return isinstance(value, list) and len(value) == layers and all(isinstance(each, str) for each in value)


def size_of(field: str) -> int | None:
    if field in PATTERNS:
        return PATTERNS[field]
    return next((size for each, size in PATTERNS.items() if fnmatch.fnmatchcase(field, each)), None)
