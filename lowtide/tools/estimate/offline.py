"""Treat a config.json as data: nothing that it names is looked up, downloaded or run."""

import os
import sys
from typing import Any

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO", "TRANSFORMERS_VERBOSITY": "error"}

# With these a config names code or weights that are elsewhere.
NAMES = {
    *("auto_map", "custom_pipelines", "quantization_config", "kernel_config", "use_kernels"),
    *("_experts_implementation", "experts_implementation", "_experts_implementation_internal"),
    *("use_pretrained_backbone", "backbone", "use_timm_backbone", "_name_or_path"),
}
ATTENTION = {"attn_implementation", "_attn_implementation", "_attn_implementation_internal"}
IN_TRANSFORMERS = ("eager", "sdpa")  # Any other attention is a package, or a kernel of the hub.


def stay_offline() -> None:
    """Keep Transformers offline for the rest of this process, whether already imported or not.

    Its warnings, which are about training, are not shown either.
    """
    os.environ.update(ENVIRONMENT)
    constants: Any = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        constants.HF_HUB_OFFLINE = True
    transformers: Any = sys.modules.get("transformers")
    if transformers is not None:
        transformers.logging.set_verbosity_error()


def plain(content: Any) -> Any:
    """Return the config without entries that name anything elsewhere, at any depth."""
    if isinstance(content, dict):
        return {name: plain(value) for name, value in content.items() if not _elsewhere(name, value)}
    return [plain(each) for each in content] if isinstance(content, list) else content


def _elsewhere(name: str, value: Any) -> bool:
    return name in NAMES or (name in ATTENTION and value not in IN_TRANSFORMERS)
