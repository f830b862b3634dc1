"""Build a model by name or from a `config.json`, with what its training step needs.

The step is the same for every loss; only `lowtide.defer_logits` makes the difference.

Shapes: B sequences, T tokens of each.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from lowtide.core.errors import ArgumentError
from lowtide.deferred.locate_head import check_head, locate_head
from lowtide.tools.demo.config import SIZES
from lowtide.tools.demo.model import GPT
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.offline import plain, stay_offline
from lowtide.tools.estimate.setting import Dtype, Setting
from lowtide.tools.layers import checkpoint_layers

BUILT_IN = {f"demo-{device}": sizes for device, sizes in SIZES.items()}
BUILT_IN_CLASSES = 32_768
FILE = "config.json"
KINDS = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
}
"""Transformers' classes for models with a head over the vocabulary, and their models by config."""
OTHER_INPUTS = {"vision_config", "audio_config"}
MOST = {"vocab_size": 2**28, "hidden_size": 2**20, "num_hidden_layers": 10_000}


def usual_dtype(model: str) -> Dtype:
    """Return the dtype of a usual training; the demo has float32 weights, with autocast on CUDA."""
    return {"demo-cpu": Dtype.float32, "demo-cuda": Dtype.autocast}.get(model, Dtype.bfloat16)


@dataclass(frozen=True)
class EstimatedModel:
    module: nn.Module
    loss: Callable[[Tensor], Tensor]  # Takes tokens_BT.
    classes: int
    width: int
    depth: int


def build(setting: Setting) -> EstimatedModel:
    """Build the model on the default device, in training mode."""
    sizes = BUILT_IN.get(setting.model)
    model = _from_file(setting) if sizes is None else _built_in(setting, sizes)
    try:
        check_head(locate_head(model.module))
    except ArgumentError as reason:
        raise UserError(f"{setting.model}: {reason}") from reason
    model.module.train()
    return model


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Any) -> Any:
        return checkpoint(self.block, *inputs, use_reentrant=False)


def _built_in(setting: Setting, sizes: dict[str, int]) -> EstimatedModel:
    if setting.dtype.weights is not torch.float32:
        raise UserError(
            f"{setting.model} trains with float32 weights: give --dtype {Dtype.autocast.value} or float32"
        )
    width, depth = sizes["width"], sizes["depth"]
    gpt = GPT(BUILT_IN_CLASSES, width, depth, tied=False)
    if setting.checkpointing:
        gpt.blocks = nn.ModuleList(map(_Checkpointed, gpt.blocks))

    def loss(tokens_BT: Tensor) -> Tensor:
        logits = gpt.head(gpt(tokens_BT)).float()
        return F.cross_entropy(logits.flatten(0, -2), tokens_BT.flatten())

    return EstimatedModel(gpt, loss, BUILT_IN_CLASSES, width, depth)


def _from_file(setting: Setting) -> EstimatedModel:
    path, config, auto, _ = _language_model(setting.model)
    kind = config.model_type
    with _building(path, kind):
        text = config.get_text_config()
        sizes = [_size(text, name) for name in MOST]
        module = auto.from_config(config, dtype=setting.dtype.weights)
        _check_length(module, text, setting.length)
    if setting.checkpointing:
        checkpoint_layers(module)

    def loss(tokens_BT: Tensor) -> Tensor:
        try:
            return module(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        except (ArgumentError, torch.OutOfMemoryError):
            raise
        except Exception as problem:
            raise UserError(f"{path}: {_reason(problem, kind, setting.length, text)}") from problem

    return EstimatedModel(module, loss, *sizes)


def _language_model(name: str) -> tuple[Path, Any, Any, type]:
    """Return a file, its config, and the class of KINDS and the model's class that are for it.

    These are what the config names, or else the first of KINDS that has a model for it.
    """
    content, path = _read(Path(name))
    stay_offline()
    try:
        import transformers
        from transformers import CONFIG_MAPPING
    except ModuleNotFoundError as missing:  # transformers hides the reason behind one of its own
        reason = missing.__cause__ or missing
        raise UserError(
            f"{path} needs transformers ({reason}); install it with: pip install '.[hf]' in lowtide's clone"
        ) from missing
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UserError(f"{path}: this version of transformers knows no model_type {kind!r}")
    with _building(path, kind):
        config = CONFIG_MAPPING[kind].from_dict(plain(content))
        found = []
        for auto, mapping in KINDS.items():
            models = getattr(transformers, mapping, {}).get(type(config), ())
            for model in models if isinstance(models, (list, tuple)) else (models,):
                found.append((path, config, getattr(transformers, auto), model))
    if not found:
        raise UserError(f"{path}: {kind} is no language model of transformers")
    named = _architectures(content)
    return next((each for each in found if each[-1].__name__ in named), found[0])


def _architectures(content: dict[str, Any]) -> list[str]:
    named = content.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


@contextlib.contextmanager
def _building(path: Path, kind: str) -> Iterator[None]:
    """Turn an error of this block into a sentence."""
    try:
        yield
    except UserError as reason:
        raise UserError(f"{path}: {reason}") from reason
    except Exception as problem:  # A config can be wrong in as many ways as there are models.
        raise UserError(
            f"{path}: transformers builds no {kind} with these values ({_in_a_line(problem)})"
        ) from problem


def departures(model: str) -> list[str]:
    """Return a sentence for each entry of a config.json that an estimate does not follow."""
    if model in BUILT_IN:
        return []
    content, path = _read(Path(model))
    found = []
    if content.get("quantization_config"):
        found.append(f"{path}: quantization_config is left out; the estimate trains weights of --dtype")
    named, (*_, built) = _architectures(content), _language_model(model)
    if named and built.__name__ not in named:
        found.append(f"{path}: the estimate is of {built.__name__}, not of {', '.join(named)}")
    if content.keys() & OTHER_INPUTS:
        found.append(f"{path}: the sequences of the estimate are text, without images or speech")
    return found


def _size(config: Any, name: str) -> int:
    """Return a size of the config, checked before a model of a billion layers is built."""
    size = getattr(config, name)
    if not isinstance(size, int) or not 1 <= size <= MOST[name]:
        raise UserError(f"{name} must be a number from 1 to {MOST[name]:,}, got {size!r}")
    return size


def _check_length(module: Any, config: Any, length: int) -> None:
    """Raise if a table of positions is too short: fake indices are never out of its range."""
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or length <= most:
        return
    tokens = module.get_input_embeddings().weight
    for each in module.get_decoder().modules():
        of_positions = isinstance(each, nn.Embedding) and each.weight is not tokens
        if of_positions and 0 <= each.num_embeddings - most <= 2:  # some models reserve two positions
            raise UserError(_too_long(most))


def _too_long(most: int) -> str:
    return f"its sequences have at most {most} tokens (max_position_embeddings): give --length {most}"


def _reason(problem: Exception, kind: str, length: int, config: Any) -> str:
    """Return why a step of a model cannot run."""
    if isinstance(problem, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"a step of this model looks at data ({problem}), and fake tensors have none"
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and most < length and str(most) in str(problem):
        return _too_long(most)
    return f"a step of this {kind} fails ({_in_a_line(problem)})"


def _in_a_line(problem: BaseException) -> str:
    """Return in one line what an error goes back to: the first of its causes.

    Such is the import behind a model that fails.
    """
    reason = problem
    while reason.__cause__ is not None:
        reason = reason.__cause__
    words = (
        str(reason) if isinstance(reason, (TypeError, ValueError)) else f"{type(reason).__name__}: {reason}"
    )
    return " ".join(words.split())[:300]


def _read(path: Path) -> tuple[dict[str, Any], Path]:
    path = path / FILE if path.is_dir() else path
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as missing:
        names = ", ".join(BUILT_IN)
        raise UserError(
            f"{path}: no such file, and no model of this name; there are {names}, or a config.json, which "
            "you download from the Hub"
        ) from missing
    except (ValueError, RecursionError) as damaged:
        raise UserError(f"{path} is not JSON: {damaged}") from damaged
    if not isinstance(content, dict):
        raise UserError(f"{path} is not the config of a model: no JSON object")
    return content, path


def fake(setting: Setting) -> EstimatedModel:
    """Return the model with fake tensors on the CPU as parameters and buffers.

    It must be called within a FakeTensorMode.
    """
    with _disable_current_modes(), torch.device("meta"):
        model = build(setting)
    made: dict[int, Tensor] = {}
    for owner in model.module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:  # A tied parameter stays tied.
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = empty
                tensors[name] = made[id(tensor)]
    return model


@contextlib.contextmanager
def masks_as_on_data(module: nn.Module) -> Iterator[None]:
    """Keep Transformers from making a mask [T, T] within this block, where none is needed.

    Transformers would make one for fake tensors, because it cannot read their positions, nor that a
    mask of padding, which some models make by themselves, hides nothing.
    """
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != "sdpa":
        yield
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks

    mask = masks["sdpa"]

    def without_packing(*args: Any, **options: Any) -> Any:
        return mask(*args, **options | {"allow_is_causal_skip": True, "attention_mask": None})

    # This overrides the registered function; deleting the override restores that function.
    masks["sdpa"] = without_packing
    try:
        yield
    finally:
        del masks["sdpa"]
