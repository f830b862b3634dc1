"""Define the models whose whole steps are measured, by the fields of their configurations."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

LENGTH, BATCH = 4096, 4
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "vocab_size": 128256}


@dataclass(frozen=True)
class StepCase:
    """Describe a model by the fields of its configuration, and the tokens of a step."""

    name: str
    source: str
    fields: dict[str, Any]
    batch: int = BATCH
    length: int = LENGTH
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    smoke: bool = False
    ranks: int | None = None
    """The ranks of FSDP2, each with tokens of its own, with `rank` the place of this one."""
    rank: int = 0


STEP_CASES = (
    StepCase(
        "Qwen3-0.6B",
        "Qwen/Qwen3-0.6B",
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 151936}
        | {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
        | {"rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    StepCase(
        "Llama-3.2-1B",
        "meta-llama/Llama-3.2-1B",
        {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    ),
    StepCase(
        "Gemma-2-2B",
        "google/gemma-2-2b",
        {"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "vocab_size": 256000}
        | {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    ),
    StepCase(
        "Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B",
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False},
    ),
    StepCase(
        "smoke",
        "a Llama of two layers",
        {**LLAMA, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
        batch=2,
        length=32,
        device="cpu",
        dtype=torch.float32,
        smoke=True,
    ),
)


def under_fsdp(case: StepCase) -> StepCase:
    """Return the case on the ranks of the default process group, with a head of its own.

    `lowtide.shard_head` refuses a head tied to the embedding, so no provider ties it.
    """
    tied = case.fields.get("tie_word_embeddings", True)
    return replace(
        case,
        name=case.name + "-untied" * tied,
        fields=case.fields | {"tie_word_embeddings": False},
        ranks=dist.get_world_size(),
        rank=dist.get_rank(),
    )
