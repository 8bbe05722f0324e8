"""``ebbtide serve``: an OpenAI-compatible endpoint over an exported model; and what it is worth."""

from __future__ import annotations

import difflib
import logging
import os
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ebbtide.commands import stdout
from ebbtide.commands.serve_check import check

log = logging.getLogger(__name__)

_RUN = "run"


class _FileFirst(TyperGroup):
    """``serve FILE`` is short for ``serve run FILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            close = difflib.get_close_matches(args[0], self.commands, n=1, cutoff=0.7)
            if close and not Path(args[0]).exists():
                ctx.fail(f"No file and no command {args[0]!r}. Did you mean {close[0]!r}?")
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="serve",
    cls=_FileFirst,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Serve a model until Ctrl-C: [bold]ebbtide serve FILE[/bold] is short for serve run.",
)
app.command()(check)


@app.command(_RUN)
def run(
    file: Path = typer.Argument(help="The job file."),
    address: str | None = typer.Option(
        None,
        "--address",
        envvar="RAY_ADDRESS",
        help="A running Ray cluster; without it, one is started here.",
    ),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a key of the job file; repeatable."
    ),
) -> None:
    """Serve a model by separate prefill and decode workers until Ctrl-C.

    The endpoint's URL goes to stdout once it answers. Serving ends with everything it started.
    EBBTIDE_API_KEYS (name=key, separated by commas) adds API keys to those of the job file.

    Example: [bold]ebbtide serve examples/stdlib-lm/serve.yaml --set http.port=8100[/bold]
    """
    from ebbtide.platform.config import load
    from ebbtide.serve import job
    from ebbtide.serve.config import ServeConfig
    from ebbtide.serve.keys import KEYS_VARIABLE, from_variable
    from ebbtide.serve.traces import endpoint_of

    config = load(file, ServeConfig, overrides)
    if config.traces is None:
        config = config.model_copy(update={"traces": endpoint_of(os.environ)})
    keys = from_variable(os.environ.pop(KEYS_VARIABLE, ""), config.http.keys)  # no child needs them
    with stdout.reserved() as result, job.start(config, address, more_keys=keys) as serving:
        print(serving.endpoint, file=result, flush=True)
        log.info("serving %s at %s; Ctrl-C ends it", serving.model_name, serving.endpoint)
        serving.wait()


@app.command()
def update(
    endpoint: str | None = typer.Argument(
        None, help="Its name or URL, where several run on this machine."
    ),
    model: str = typer.Option(..., "--model", metavar="URI", help="What `ebbtide export` wrote."),
) -> None:
    """Have a running endpoint serve another model, without a request that is not answered.

    Run it beside `ebbtide serve FILE`, as the same user. The new model's files are verified, its
    workers start, requests go to them, and the old ones end what they have begun. If the new model
    does not load, the old one serves on. Ctrl-C before requests go to the new model gives it up.

    Example: [bold]ebbtide serve update --model ~/.ebbtide/export/stdlib-lm-2[/bold]
    """
    from ebbtide.platform.storage import open_storage
    from ebbtide.serve import control

    uri = open_storage(model).uri  # a relative path is one of this command's directory
    path = control.choose(control.running(), endpoint)
    last = ""
    for last in control.ask(path, {"update": uri}):
        log.info("%s", last)
    print(last)
