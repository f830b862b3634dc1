"""Define the options of `lowtide bench` that run on the ranks of torchrun, and check them."""

from typing import Annotated, Any

import typer

from lowtide.tools.errors import UserError
from lowtide.tools.ranks import check_alone, check_launched, world_size


def _ranks(help: str) -> Any:
    return typer.Option(min=1, metavar="RANKS", help=help, show_default="one process")


TensorParallel = Annotated[
    int | None, _ranks("Under torchrun: divide the classes over so many ranks, which have the same tokens.")
]
FullySharded = Annotated[
    int | None, _ranks("Under torchrun: FSDP2 over so many ranks, each with tokens of its own.")
]


def check_ranks(command: str, **given: int | None) -> None:
    """Raise unless torchrun has started as many ranks as the one option that is given says.

    `given` are all of the command's options for ranks, by name.
    """
    chosen = {name: number for name, number in given.items() if number is not None}
    if not chosen:
        check_alone(" or ".join(f"--{name} {world_size()}" for name in given))
        return
    if len(chosen) > 1:
        raise typer.BadParameter("each divides all ranks in a way of its own", param_hint=" and ".join(
            f"--{name}" for name in chosen
        ))  # fmt: skip
    ((name, number),) = chosen.items()
    check_launched(f"--{name}", f"bench {command} --{name} {number}", ranks=number)
    if number != world_size():
        raise UserError(
            f"--{name} {number}: torchrun has started {world_size()}; give it --nproc-per-node={number}"
        )
