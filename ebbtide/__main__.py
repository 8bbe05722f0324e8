"""The ``ebbtide`` command line. Results go to stdout, progress and logs to stderr."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from ebbtide import __version__
from ebbtide.platform import log, signals
from ebbtide.platform.errors import EbbtideError

_COMMANDS = (
    "agent",
    "chaos",
    "checkpoints",
    "cost",
    "data",
    "demo",
    "diff",
    "export",
    "plan",
    "prices",
    "report",
    "serve",
    "simulate",
    "submit",
    "train",
    "tune",
)
_OPTIONS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Commands(TyperGroup):
    """The commands; one is imported when it is called, all of them to be listed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for name in (cmd_name,) if cmd_name in _COMMANDS else _COMMANDS:  # to say what is near
            if name not in self.commands:
                self.add_command(_command(name), name)
        return super().get_command(ctx, cmd_name)


def _command(name: str) -> Any:
    """``ebbtide.commands.NAME`` has a group of commands as ``app``, or the function ``NAME``."""
    module = importlib.import_module(f"ebbtide.commands.{name}")
    if hasattr(module, "app"):
        group = typer.main.get_group(module.app)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, **_OPTIONS)
    alone.command(name)(getattr(module, name))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="ebbtide",
    cls=_Commands,
    help="Train, tune and serve language models on Ray at the lowest cost per completed run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    **_OPTIONS,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ebbtide {__version__}")
        raise typer.Exit


@app.callback()
def entry(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    log.configure()


def main() -> None:
    """Run the command line; an error of ebbtide's tree becomes one message and its exit code.

    Ctrl-C and SIGTERM unwind it, so that whatever was started is ended, and exit with 130 and 143;
    a second one changes nothing about that.
    """
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray colours what goes to a file, too
    with signals.unwinding():
        try:
            app()
        except EbbtideError as error:
            from rich.console import Console

            Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, style="red")
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
