"""Where figures come from: versions, card and commit, as every table says them."""

import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import lowtide

ENVIRONMENT = ("date", "card", "torch", "triton", "lowtide")


@dataclass(frozen=True)
class Environment:
    """What the numbers depend on besides the case; the first columns of every row of the CSV."""

    date: str
    card: str
    torch: str
    triton: str
    lowtide: str

    @classmethod
    def of(cls, device: str) -> "Environment":
        return cls(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            card=_card(device),
            torch=torch.__version__,
            triton=version("triton"),
            lowtide=commit() or lowtide.__version__,
        )


def version(distribution: str) -> str:
    """The installed version, or nothing. A checkout that was never installed still knows its own."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return lowtide.__version__ if distribution == "lowtide" else ""


def commit() -> str:
    """The commit of the checkout that lowtide is imported from, `-dirty` where its Python files are not those
    of the commit, whatever else lies there; nothing for an installed package."""
    package = Path(lowtide.__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(package), *arguments], capture_output=True, text=True)
        return done.stdout.strip()

    try:
        # A package installed below somebody else's checkout is not one of its tracked files.
        tracked = git("ls-files", "__init__.py")
        if not tracked:
            return ""
        changed = git("status", "--porcelain", "--", "*.py")  # in the package's folder and below
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except FileNotFoundError:  # no git on this machine
        return ""


def _card(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability}, {torch.get_num_threads()} threads"
