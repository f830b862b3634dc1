"""`lowtide`: the command line, a small module a command. Its libraries come with the extra `lowtide[cli]`."""

import sys
from typing import Annotated


def main() -> None:
    try:
        import rich  # noqa: F401
        import typer
    except ModuleNotFoundError as missing:
        sys.exit(
            f"lowtide: the command line needs {missing.name}; install it with: pip install 'lowtide[cli]'"
        )

    from lowtide import __version__
    from lowtide.cli import bench, doctor, estimate, profile, timeline, train

    app = typer.Typer(
        name="lowtide",
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

    bench.app.command("memory-timeline")(timeline.memory_timeline)
    app.add_typer(bench.app, name="bench")
    app.add_typer(doctor.app, name="doctor")
    app.command("estimate")(estimate.estimate)
    app.command("profile", context_settings=profile.SETTINGS)(profile.profile)
    app.command("train")(train.train)
    app()
