"""``ebbtide train``: a training job from its file to the end."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ebbtide.commands import stdout

if TYPE_CHECKING:
    from ebbtide.train.config import TrainConfig
    from ebbtide.train.driver import Progress
    from ebbtide.train.job import RunResult
    from ebbtide.tune.follow import Follower

_FIRST_LINE_S, _LAST_LINE_S, _LINE_GROWTH = 2.0, 30.0, 1.1


def train(
    file: Path | None = typer.Argument(None, help="The job file (YAML).", show_default=""),
    resume: str | None = typer.Option(
        None,
        "--resume",
        metavar="URI",
        help="Instead of a job file: a checkpoint of a run that was paused, here or on another "
        "cluster (or the run itself). Its job is stored with it.",
    ),
    overrides: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a key of the file. May be repeated."
    ),
    address: str | None = typer.Option(
        None,
        help="A Ray cluster: host:port of its head (from one of its nodes), or its dashboard's "
        "http://host:port. Default: RAY_ADDRESS, else this machine alone.",
    ),
    digest: bool = typer.Option(
        False,
        "--digest",
        help="Log a digest of the training state at every step, for ebbtide diff.",
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document about the finished run."),
) -> None:
    """Train a language model to the end, through evictions, kills and growth of the cluster.

    A run is known by its name and storage: the same command again goes on from the newest
    checkpoint, and says so if the run is finished.

    A run that was paused goes on by a checkpoint's URI alone, on any cluster that reaches it.

    Example: [bold]ebbtide train examples/stdlib-lm/train.yaml --set optimizer.lr=3e-4[/bold]
    """
    from ebbtide.platform import config as job_file
    from ebbtide.platform.errors import ConfigError
    from ebbtide.train.config import TrainConfig
    from ebbtide.train.paused import paused_job

    if digest:
        overrides = [*overrides, "digest=true"]
    if (file is None) == (resume is None):
        raise ConfigError("give a job file, or the URI of a checkpoint with --resume")
    if address is not None and address.startswith(("http://", "https://")):
        _submit(file, resume, overrides, address, as_json)
        return
    if resume is not None:
        config = paused_job(resume, overrides)
    else:
        assert file is not None
        config = job_file.load(file, TrainConfig, overrides)
    from ebbtide.train.job import train as run

    with stdout.reserved(), contextlib.ExitStack() as stack:
        validates = _on_the_pool(stack, config, address)
        result = run(config, address=address, on_progress=ProgressLine())
    if validates is not None and validates.loss is not None:
        result = replace(result, validation_loss=validates.loss)
    if as_json:
        typer.echo(json.dumps(document(result), indent=2))
    else:
        typer.echo(summary(result))


def _submit(
    file: Path | None, resume: str | None, overrides: list[str], address: str, as_json: bool
) -> None:
    from ebbtide.commands.submit import require_lasting, run_there, submit

    if file is not None:
        submit(file, overrides, address, Path("."), None, False, as_json)
    else:
        require_lasting(str(resume), "--resume")
        what = ["--resume", str(resume)]
        run_there(what, overrides, address, Path("."), None, False, as_json)


def _on_the_pool(
    stack: contextlib.ExitStack, config: TrainConfig, address: str | None
) -> Follower | None:
    """What validates the run beside it, if the job wants that; at work until the stack ends."""
    if config.validation.where == "here":
        return None
    from ebbtide.train.ray_connection import connected
    from ebbtide.tune.follow import Follower

    stack.enter_context(connected(address))
    return stack.enter_context(Follower(config))


class ProgressLine:
    """Writes where the run is to stderr: often at first and after a restart, then seldom."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._next_s, self._interval_s = 0.0, _FIRST_LINE_S

    def __call__(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if progress.attempt != self._attempt:
            self._attempt, self._interval_s = progress.attempt, _FIRST_LINE_S
        elif now_s < self._next_s and progress.step < progress.steps:
            return
        self._next_s = now_s + self._interval_s
        self._interval_s = min(_LAST_LINE_S, self._interval_s * _LINE_GROWTH)
        typer.echo(progress_line(progress), err=True)


def progress_line(progress: Progress) -> str:
    """Step, loss, tokens/s, world size, attempt, dollars so far."""
    rate = progress.tokens_per_s
    workers = "1 worker" if progress.world_size == 1 else f"{progress.world_size} workers"
    return "  ".join(
        (
            f"step {progress.step}/{progress.steps}",
            f"loss {progress.loss:.4f}",
            "- tokens/s" if rate is None else f"{rate:,.0f} tokens/s",
            workers,
            f"attempt {progress.attempt}",
            progress.budget or _dollars(progress.usd, progress.usd_partial),
        )
    )


def _dollars(usd: Decimal | None, partial: bool) -> str:
    from ebbtide.platform.account import usd_text

    if usd is None:
        return "cost unknown"
    return usd_text(usd) + (" (partial)" if partial else "")


def document(result: RunResult) -> dict[str, Any]:
    """The result as plain values; dollars as a number, null if unknown."""
    return {**asdict(result), "usd": None if result.usd is None else float(round(result.usd, 9))}


def summary(result: RunResult) -> str:
    """The result for a person."""
    if result.was_finished:
        head = f"{result.name} was finished already, at step {result.step}"
    else:
        attempts = "1 attempt" if result.attempts == 1 else f"{result.attempts} attempts"
        head = f"{result.name} is finished: {result.step} steps in {attempts}"
        head += (
            f", {result.steps_lost} steps made again, {_dollars(result.usd, result.usd_partial)}"
        )
    losses = [
        f"{name} {loss:.4f}"
        for name, loss in (("loss", result.loss), ("validation loss", result.validation_loss))
        if loss is not None
    ]
    lines = [head, *([", ".join(losses)] if losses else []), f"run: {result.run_uri}"]
    return "\n".join(lines)
