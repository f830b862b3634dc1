"""Divide a model's layers and classes over ranks by torch's tensor parallelism.

Transformers' models have a plan, which names a style for each layer. torch has the same styles.
"""

from typing import Any

from torch import Tensor, nn

from lowtide.core.collectives import is_dtensor
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.ranks import mesh_of
from lowtide.tools.estimate.setting import Optimizer, Setting


def divide(module: nn.Module, setting: Setting) -> None:
    """Divide the model over ranks that share tokens, as Transformers' tp_plan="auto" does."""
    from torch.distributed.tensor.parallel import parallelize_module  # slow to import

    if setting.optimizer is Optimizer.adafactor:
        raise UserError(
            "--tp: torch's Adafactor cannot step divided parameters: give --optimizer adamw or sgd"
        )
    plan = _plan(module, setting)
    places = _places(module)
    parallelize_module(module, mesh_of(setting, "tp"), plan)
    for first, *others in places.values():
        _tie(first, others, setting)


def _plan(module: nn.Module, setting: Setting) -> dict[str, Any]:
    named, styles = getattr(module, "tp_plan", None), _styles()
    if not named:
        raise UserError(f"{setting.model}: --tp needs a model of transformers with a tp_plan; this has none")
    if unknown := {*named.values()} - styles.keys():
        raise UserError(f"{setting.model}: --tp knows no {', '.join(sorted(unknown))} of the model's tp_plan")
    config: Any = module.config
    heads = getattr(config.get_text_config(), "num_key_value_heads", None)
    divided = any(name.endswith(".k_proj") and style == "colwise" for name, style in named.items())
    if divided and heads is not None and heads % setting.tp:
        raise UserError(f"{setting.model}: --tp {setting.tp} cannot divide {heads} key-value heads evenly")
    return {name: styles[style] for name, style in named.items() if styles[style] is not None}


def _styles() -> dict[str, Any]:
    """Return torch's style for each of Transformers' names; None for layers that every rank has."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    gathers = ColwiseParallel(output_layouts=Replicate())
    splits = RowwiseParallel(input_layouts=Replicate())
    return {
        "colwise": ColwiseParallel(),
        "colwise_gather_output": gathers,
        "colwise_rep": gathers,  # in older versions of Transformers
        "rowwise": RowwiseParallel(),
        "rowwise_split_input": splits,
        "rowwise_rep": splits,
        "embedding_rowwise": splits,
        "replicate": None,
        "replicated_with_grad_allreduce": None,  # its all-reduce is in place, and holds nothing more
    }


def _places(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules and names of each parameter."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return places


def _tie(first: tuple[nn.Module, str], others: list[tuple[nn.Module, str]], setting: Setting) -> None:
    """Put the parameter of the first place at the others: torch has divided each on its own."""
    kept = _at(first)
    for other in others:
        if _placements(_at(other)) != _placements(kept):
            raise UserError(f"{setting.model}: --tp: the model's tp_plan divides a tied weight in two ways")
        owner, name = other
        owner.register_parameter(name, kept)


def _at(place: tuple[nn.Module, str]) -> nn.Parameter:
    owner, name = place
    parameter: nn.Parameter = getattr(owner, name)
    return parameter


def _placements(tensor: Tensor) -> Any:
    return tensor.placements if is_dtensor(tensor) else None
