"""Report the environment of lowtide: versions, devices and torch's settings."""

import platform

import torch

import lowtide
from lowtide.tools.environment import card, present, version
from lowtide.tools.units import readable

# Packages that lowtide works with, or is compared with.
OTHERS = (
    *("transformers", "accelerate", "peft", "lightning", "trl"),
    *("liger-kernel", "cut-cross-entropy", "quack-kernels", "xformers"),
)


def environment() -> dict[str, str]:
    """Return each fact by its name, in the order in which they are shown."""
    return {
        "lowtide": lowtide.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton(),
        **_devices(),
        "float32 products on CUDA": _float32_products(),
        "torch's attention kernels": _sdpa(),
        "others": ", ".join(f"{name} {version(name)}" for name in OTHERS if version(name)) or "none",
    }


def _triton() -> str:
    try:
        import triton
    except ModuleNotFoundError:
        return "not installed: no kernels of ours, plain torch in their place"
    interpreted = ", interpreted (TRITON_INTERPRET=1)" if triton.knobs.runtime.interpret else ""
    return f"{triton.__version__}{interpreted}"


def _devices() -> dict[str, str]:
    found = {"cpu": card("cpu")}
    if present("mps"):
        found["mps"] = f"macOS {platform.mac_ver()[0]}"
    if present("xpu"):
        found |= {
            f"xpu:{index}": torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())
        }
    if not torch.cuda.is_available():
        return found | {"cuda": "no device" if torch.version.cuda else "torch is built without it"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{readable(properties.total_memory, '.0f')}, CUDA {torch.version.cuda}"
        )
    return found


def _float32_products() -> str:
    setting = torch.backends.cuda.matmul.fp32_precision
    return "TF32, as torch is allowed it" if setting == "tf32" else "exact to float32"


def _sdpa() -> str:
    """Return the names of torch's attention kernels that are switched on."""
    cuda = torch.backends.cuda
    switches = {
        "cudnn": cuda.cudnn_sdp_enabled,
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
    }
    return ", ".join(name for name, enabled in switches.items() if enabled()) or "all switched off"
