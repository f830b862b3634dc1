"""All classes of the installed transformers for language models, as small as their configurations
allow, with random weights: nothing is downloaded. And one training step of each.

Shapes: B sequences, T tokens, V vocabulary.
"""

import inspect
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from tests.deferred.helpers import norm, within_eager
from tests.integrations.sizes import V, small

B, T = 2, 12
MOST_PARAMETERS = 15_000_000

MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    getattr(modeling_auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}),  # Not in Transformers 4.
)


class NotTried(Exception):
    """Why a class is none that can be built small and trained."""


def everything() -> list[str]:
    """The names of all classes."""
    names = (name for mapping in MAPPINGS for name in mapping.values())
    return list(dict.fromkeys(name for name in names if isinstance(name, str)))


def build(name: str, **options: Any) -> nn.Module:
    kind = getattr(transformers, name)
    if "labels" not in inspect.signature(kind.forward).parameters:
        raise NotTried("its forward takes no labels")
    config = kind.config_class()
    if hasattr(config, "is_decoder") and ("CausalLM" in name or "LMHead" in name):
        options = {"is_decoder": True} | options
    try:
        config = small(config, **options)
    except StrictDataclassClassValidationError as error:
        raise NotTried("its config checks sizes that depend on each other") from error
    config._experts_implementation = "eager"  # in any dtype
    with torch.device("meta"):
        parameters = sum(each.numel() for each in kind(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise NotTried(f"{parameters / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for field, value in vars(module).items():
            if "drop" in field and isinstance(value, float):
                setattr(module, field, 0.0)
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, V, (B, T), generator=generator)
    labels = tokens.clone()
    labels[:, :2] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The loss and the gradient of each parameter, by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    loss = model(**(inputs or batch())).loss
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"loss": loss.detach(), **gradients}


def check(
    found: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Each within twice eager's error and a rounding. In float32 the rounding is that of all
    gradients, as some are 0 but for it, and a few of the loss, which eager may have right by luck;
    in bfloat16 its own."""
    assert found.keys() == eager.keys()
    whole = sum(norm(each) ** 2 for name, each in exact.items() if name != "loss") ** 0.5
    for name, ours in found.items():
        size = 8 * norm(ours) if name == "loss" else whole
        if dtype == torch.bfloat16:
            size = norm(exact[name])
        within_eager(ours, eager[name], exact[name], dtype, size=size)
