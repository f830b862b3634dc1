"""Find the head of a model, and check that its logits can be deferred."""

from types import MethodType
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.deferred.recorded.sharded import transformers_forward


def locate_head(model: nn.Module) -> nn.Module:
    """Return the model's output embedding, or the only linear layer that can be one."""
    model = _unwrapped(model)
    own = getattr(model, "get_output_embeddings", None)
    found = own() if callable(own) else None
    if found is not None:
        return found
    embeddings = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    vocabularies = {each.num_embeddings for each in embeddings}
    heads = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear) and each.out_features in vocabularies
    }
    for name in list(heads):  # Drop a layer inside a head: it is an adapter's second product.
        if any(name.startswith(f"{outer}.") for outer in heads):
            del heads[name]
    # If a model has as many positions as features, its other layers match the embedding of the
    # positions too, but are not tied to an embedding.
    tied = [each for each in heads.values() if any(each.weight is other.weight for other in embeddings)]
    for found in (list(heads.values()), tied):
        if len(found) == 1:
            return found[0]
    names = [*list(heads)[:4], *(["..."] if len(heads) > 4 else [])]
    raise ArgumentError(
        f"{type(model).__name__} has no linear head that could be told from its other layers: "
        + (f"{', '.join(names)} all have" if heads else "no nn.Linear has")
        + " as many outputs as an nn.Embedding has rows; pass head=, the module whose forward makes the "
        "logits by a product with its weight"
    )


def check_model(model: object, head: object) -> None:
    if not isinstance(model, nn.Module):
        came = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ArgumentTypeError(f"model must be a torch.nn.Module, got {came}")
    if isinstance(head, nn.Module) and all(each is not head for each in model.modules()):
        raise ArgumentError(
            f"head must be a module of the model, and this {type(head).__name__} is not in "
            f"{type(model).__name__}; pass the model that calls it"
        )


def classes(head: nn.Module) -> int:
    """Return the number of outputs of the head's product."""
    if isinstance(head, nn.Linear) and is_parametrized(head, "weight"):
        return head.out_features  # to look at such a weight would compute it
    weight = getattr(head, "weight", None)
    if weight is not None and weight.dim() == 2:
        return weight.shape[0]
    found = [each.out_features for each in head.modules() if isinstance(each, nn.Linear)]
    return max(found, default=0)


def check_head(head: Any) -> None:
    if not isinstance(head, nn.Module):
        came = type(head).__name__
        raise ArgumentTypeError(f"head must be a torch.nn.Module, as model.lm_head, got {came}")
    if any("lowtide_deferral" in vars(each) for each in type(head).__mro__):
        raise ArgumentError("the model's logits are deferred already; undo() the first deferral, or use it")
    for name, parameter in head.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise ArgumentError(
                f"DeepSpeed ZeRO-3 has partitioned the head's {name}, and gathers it only within the head's "
                "own forward; the loss needs it later. Use ZeRO-1 or -2 or FSDP2, or call "
                "lowtide.linear_cross_entropy on the hidden states under deepspeed.zero.GatheredParameters"
            )
    own = vars(head).get("forward")
    # Hooks leave the class's own forward on the instance when they are removed.
    known = transformers_forward(head) is not None or own == MethodType(type(head).forward, head)
    if own is not None and not known:
        raise ArgumentError(
            f"something has replaced the forward of this {type(head).__name__} alone (accelerate's hooks do "
            "so), and the deferral would not be called; remove it, or call defer_logits first"
        )
    if type(head).forward is nn.Module.forward:
        raise ArgumentError(
            f"this {type(head).__name__} has no forward, so no logits of its own: pass head=, the one of its "
            "modules whose logits are to be deferred"
        )
    if not isinstance(head, nn.Embedding) and classes(head) == 1:
        raise ArgumentError(
            f"this {type(head).__name__} has one output (a reward, a value), which takes hardly any memory; "
            "pass head=, the module that makes the logits of many classes, or leave the model as it is"
        )
    if isinstance(head, nn.Embedding) or classes(head) < 2:
        raise ArgumentError(
            f"{type(head).__name__} is no linear head: pass head=, the module whose forward multiplies "
            "hidden states by a weight [classes, features]; a model that does so without a module cannot be "
            "deferred: call lowtide.linear_cross_entropy in it"
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    if isinstance(model, DataParallel) and len(model.device_ids) > 1:
        raise ArgumentError(
            "DataParallel copies the logits of each device to the first, and deferred logits cannot be "
            "copied; use DistributedDataParallel, one process a device (torchrun)"
        )
    while isinstance(model, (DataParallel, DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    return model
