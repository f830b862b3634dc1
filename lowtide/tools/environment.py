"""Choose the device, and find versions, card and commit, which every table of figures states."""

import platform
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from enum import Enum
from importlib import metadata
from pathlib import Path

import torch

import lowtide
from lowtide.tools.errors import UserError
from lowtide.tools.ranks import launched, world_size


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class AnyDevice(str, Enum):
    """Name the devices that calls run on; those after cuda in plain torch."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"
    xpu = "xpu"


@dataclass(frozen=True)
class Environment:
    """Hold what the numbers depend on besides the case: the first columns of every CSV row."""

    date: str
    card: str
    torch: str
    triton: str
    lowtide: str
    clocks: str
    command: str

    @classmethod
    def of(cls, device: str) -> "Environment":
        return cls(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            card=card(device),
            torch=torch.__version__,
            triton=version("triton"),
            lowtide=commit() or lowtide.__version__,
            clocks=clocks(device),
            command=shlex.join([*launcher(), *sys.argv[1:]]),
        )


ENVIRONMENT = tuple(each.name for each in fields(Environment))


def launcher() -> list[str]:
    """Return the words that start this command."""
    if not launched():
        return ["lowtide"]
    return ["torchrun", f"--nproc-per-node={world_size()}", "-m", "lowtide"]


def present(device: str) -> bool:
    """Return True if torch sees such a device on this machine."""
    asked = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "xpu": torch.xpu.is_available,
    }
    return device == "cpu" or asked[device]()


def choose_device(asked: Device | AnyDevice) -> str:
    """Return the device that was asked for; for auto the first that is not the CPU, if any."""
    name = asked.value
    if name == "auto":
        others = (each.value for each in type(asked) if each.value not in ("auto", "cpu"))
        return next(filter(present, others), "cpu")
    if not present(name):
        kind = name.replace("cuda", "CUDA")
        raise UserError(f"--device {name}: torch sees no {kind} device here; leave --device out")
    return name


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def version(distribution: str) -> str:
    """Return the installed version, or "". A checkout that was never installed knows its own."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return lowtide.__version__ if distribution == "lowtide" else ""


def commit() -> str:
    """Return the commit of the checkout that lowtide is imported from, or "" for a package.

    It ends in `-dirty` if the package's Python files differ from the commit; other files do not
    matter.
    """
    package = Path(lowtide.__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    try:
        # A package installed below another project's checkout is not one of its tracked files.
        tracked = git("ls-files", "__init__.py")
        if not tracked:
            return ""
        changed = git("status", "--porcelain", "--", "*.py")  # In the package's folder and below.
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except FileNotFoundError:  # There is no git on this machine.
        return ""


def card(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return f"{platform.machine()} {capability}, {threads} thread{'s' * (threads > 1)}"


def clocks(device: str) -> str:
    """Return the clocks that bound the figures, or "" where the machine does not tell them.

    Of a card, the highest clock of its multiprocessors, the clock of its memory and the limit of
    its power; of a CPU, what its first core runs at.
    """
    if device == "cuda":
        names = "clocks.max.sm,clocks.mem,power.limit"
        chosen = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"
        command = ["nvidia-smi", chosen, f"--query-gpu={names}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):  # A card of another maker, or a container.
            return ""
        return "SM {}, memory {}, {}".format(*done.stdout.strip().split(", "))
    try:
        found = re.search(r"^cpu MHz\s*: (\d+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # There is none but on Linux.
        return ""
    return f"{found[1]} MHz" if found else ""
