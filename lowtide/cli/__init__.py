"""Define the command line, `lowtide`, with one small module for each command, or a folder.

Its libraries come with the extra `lowtide[cli]`.

Folders and modules, in the order of imports:

* shared: errors, options and progress of several commands.
* bench: `lowtide bench`, a module for each group of its commands.
* doctor: `lowtide doctor`.
* estimate: `lowtide estimate`.
* profile: `lowtide profile`.
* train: `lowtide train`.
* warmup: `lowtide warmup`.
"""

import sys
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer


def main() -> None:
    try:
        for stream in (sys.stdout, sys.stderr):
            # A terminal may not be UTF-8.
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        make_app()()
    except ModuleNotFoundError as missing:
        if missing.name not in ("rich", "tokenizers", "typer"):
            raise
        sys.exit(
            f"lowtide: the command line needs {missing.name}; install it with: pip install '.[cli]' "
            "in lowtide's clone"
        )
    except KeyboardInterrupt:  # Interrupted outside of any command.
        sys.exit(130)


def make_app() -> "typer.Typer":
    import rich  # noqa: F401
    import typer

    from lowtide import __version__
    from lowtide.cli import bench, doctor, estimate, profile, train, warmup
    from lowtide.cli.shared.errors import Commands

    app = typer.Typer(
        name="lowtide",
        cls=Commands,
        help="Keep the high-water mark of training memory low.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def options(
        version: Annotated[bool, typer.Option("--version", help="Print the version, and exit.")] = False,
    ) -> None:
        if version:
            print(f"lowtide {__version__}")
            raise typer.Exit

    app.add_typer(bench.app, name="bench")
    app.add_typer(doctor.app, name="doctor")
    app.command("estimate")(estimate.estimate)
    app.command("profile", context_settings=profile.SETTINGS)(profile.profile)
    app.command("train")(train.train)
    app.command("warmup")(warmup.warmup)
    return app
