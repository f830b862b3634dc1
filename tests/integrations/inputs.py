"""What each model of tests/integrations/zoo.py is given in a training step: text, or what it does
not run without.

Shapes: B sequences, T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.integrations.sizes import IMAGE, V
from tests.integrations.zoo import B, T, batch

Inputs = dict[str, Tensor]


def inputs_of(model: nn.Module) -> tuple[str, Inputs]:
    """What they are, in words; and the arguments of its forward."""
    words, function = KINDS.get(type(model).__name__, ("text", lambda config: {}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        inputs = batch() | function(model.config)
    if words in ("image", "speech"):
        del inputs["input_ids"]
    return words, inputs


def image(config: Any, *frames: int) -> Inputs:
    """Some models have their features in the place of a text's first tokens."""
    vision = config.vision_config if hasattr(config, "vision_config") else config.encoder
    found = {"pixel_values": torch.randn(B, *frames, 3, vision.image_size, vision.image_size)}
    queries = getattr(config, "num_query_tokens", 0) * sum(frames or (1,))
    if queries:
        found["input_ids"] = torch.cat(
            [torch.full((B, queries), IMAGE), batch()["input_ids"][:, queries:]], 1
        )
    if hasattr(config, "qformer_config") and hasattr(config.qformer_config, "vocab_size"):
        found["qformer_input_ids"] = batch()["input_ids"]
    return found


def idefics(config: Any) -> Inputs:
    return image(config, 1) | {"image_attention_mask": torch.ones(B, T, 1)}


def kosmos2(config: Any) -> Inputs:
    return image(config) | {
        "image_embeds_position_mask": torch.arange(T).expand(B, T) < config.latent_query_num
    }


def patches(config: Any) -> Inputs:
    """Row, column, numbers."""
    places, numbers = torch.ones(B, 6, 2), torch.randn(B, 6, config.vision_config.patch_embed_hidden_size)
    return {"flattened_patches": torch.cat([places, numbers], -1)}


def boxes(config: Any) -> Inputs:
    return {"bbox": torch.rand(B, T, 2).sort(-1).values.repeat(1, 1, 2)}


def samples(config: Any) -> Inputs:
    return {"input_values": torch.randn(B, 4000)}


def features(*shape: int | str) -> Callable[[Any], Inputs]:
    """Of sizes, or of the names that the configuration has for them."""

    def function(config: Any) -> Inputs:
        audio = next((getattr(config, part) for part in PARTS if hasattr(config, part)), config)
        sizes = [size if isinstance(size, int) else getattr(audio, size) for size in shape]
        return {"input_features": torch.randn(B, *sizes)}

    return function


def masked_features(*shape: int | str) -> Callable[[Any], Inputs]:
    def function(config: Any) -> Inputs:
        found = features(*shape)(config)
        return found | {"attention_mask": torch.ones(found["input_features"].shape[:2], dtype=torch.long)}

    return function


def text_and_codes(config: Any) -> Inputs:
    return {"input_ids": batch()["input_ids"][..., None].repeat(1, 1, 1 + config.num_codebooks)}


def codes(config: Any) -> Inputs:
    """Several sequences side by side."""
    tokens, labels = (batch()[name] for name in ("input_ids", "labels"))
    return {
        "input_ids": tokens.repeat_interleave(config.num_codebooks, 0),
        "labels": labels[..., None].repeat(1, 1, config.num_codebooks),
    }


def dia(config: Any) -> Inputs:
    tokens, labels = (batch()[name] for name in ("input_ids", "labels"))
    channels = config.decoder_config.num_channels
    return {
        "decoder_input_ids": tokens[..., None].repeat(1, 1, channels),
        "labels": labels.repeat_interleave(channels, 0),
    }


PARTS = ("audio_config", "encoder_config")
KINDS: dict[str, tuple[str, Callable[[Any], Inputs]]] = {
    "BlipForConditionalGeneration": ("text, image", image),
    "Blip2ForConditionalGeneration": ("text, image", image),
    "CanaryForConditionalGeneration": ("speech", masked_features(64, "num_mel_bins")),
    "CohereAsrForConditionalGeneration": ("speech", masked_features(64, "num_mel_bins")),
    "DiaForConditionalGeneration": ("text, codes", dia),
    "GitForCausalLM": ("text, image", image),
    "IdeficsForVisionText2Text": ("text, image", idefics),
    "InstructBlipForConditionalGeneration": ("text, image", image),
    "InstructBlipVideoForConditionalGeneration": ("text, images", lambda config: image(config, 4)),
    "Kosmos2ForConditionalGeneration": ("text, image", kosmos2),
    "KyutaiSpeechToTextForConditionalGeneration": ("text, codes", text_and_codes),
    "Molmo2ForConditionalGeneration": (
        "text",
        lambda config: {"mm_token_type_ids": torch.zeros(B, T, dtype=torch.long)},
    ),
    "MoonshineForConditionalGeneration": ("speech", samples),
    "MoonshineStreamingForConditionalGeneration": ("speech", samples),
    "MusicgenForCausalLM": ("codes", codes),
    "MusicgenMelodyForCausalLM": ("codes", codes),
    "PerceiverForMaskedLM": (
        "text",
        lambda config: {"labels": torch.randint(V, (B, config.max_position_embeddings))},
    ),
    "Pix2StructForConditionalGeneration": ("image", patches),
    "PPFormulaNetForConditionalGeneration": (
        "image",
        lambda config: image(config) | {"decoder_input_ids": batch()["input_ids"]},
    ),
    "SeamlessM4TForSpeechToText": ("speech", features(16, "feature_projection_input_dim")),
    "SeamlessM4Tv2ForSpeechToText": ("speech", features(16, "feature_projection_input_dim")),
    "Speech2TextForConditionalGeneration": ("speech", features(32, "input_feat_per_channel")),
    "SpeechEncoderDecoderModel": ("speech", samples),
    "SpeechT5ForSpeechToText": ("speech", samples),
    "UdopForConditionalGeneration": ("text, boxes", boxes),
    "VisionEncoderDecoderModel": ("image", image),
    "VoxtralRealtimeForConditionalGeneration": ("text, speech", features("num_mel_bins", 8 * T)),
    "WhisperForConditionalGeneration": ("speech", features("num_mel_bins", 32)),
}
