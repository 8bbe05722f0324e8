"""The ``ebbtide`` command line. Results go to stdout, progress and logs to stderr."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console

from ebbtide import __version__
from ebbtide.commands import data, plan, serve, tune
from ebbtide.commands.agent import agent
from ebbtide.commands.chaos import chaos
from ebbtide.commands.checkpoints import checkpoints
from ebbtide.commands.cost import cost
from ebbtide.commands.demo import demo
from ebbtide.commands.diff import diff
from ebbtide.commands.export import export
from ebbtide.commands.prices import prices
from ebbtide.commands.report import report
from ebbtide.commands.simulate import simulate
from ebbtide.commands.submit import submit
from ebbtide.commands.train import train
from ebbtide.platform import log, signals
from ebbtide.platform.errors import EbbtideError

app = typer.Typer(
    name="ebbtide",
    help="Train, tune and serve language models on Ray at the lowest cost per completed run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
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


app.command()(agent)
app.command()(chaos)
app.command()(checkpoints)
app.command()(cost)
app.command()(demo)
app.command()(diff)
app.command()(export)
app.command()(prices)
app.command()(report)
app.command()(simulate)
app.command()(submit)
app.command()(train)
app.add_typer(data.app, name="data")
app.add_typer(plan.app, name="plan")
app.add_typer(serve.app, name="serve")
app.add_typer(tune.app, name="tune")


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
            Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, style="red")
            sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
