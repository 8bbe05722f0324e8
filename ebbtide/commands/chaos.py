"""``ebbtide chaos``: evictions, kills, hangs and new nodes for a local cluster."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ebbtide.platform.chaos_deeds import Happening
    from ebbtide.platform.chaos_plan import Plan

_MAX_EVENTS = 100_000


def chaos(
    plan: Path | None = typer.Option(
        None, help="What is to happen and when (YAML; see docs/training.md)."
    ),
    rate: float | None = typer.Option(
        None, help="Instead of a plan: so many events per hour, drawn by the seed."
    ),
    seed: int = typer.Option(0, help="Seed of --rate."),
    duration_s: float = typer.Option(3600.0, min=0, help="How long --rate goes on."),
    address: str = typer.Option(
        ..., envvar="RAY_ADDRESS", help="HOST:PORT of a local cluster's head."
    ),
    run: str | None = typer.Option(
        None, metavar="URI", help="The run whose steps at_step counts: its storage and name."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON line for each thing done."),
) -> None:
    """Drain, kill, stop and add nodes of a local cluster by a plan, until the plan is done.

    Clusters of other machines are refused. Ctrl-C lets everything that is stopped go on.

    Example: [bold]ebbtide chaos --rate 30 --seed 1 --address 127.0.0.2:43210[/bold]
    """
    from ebbtide.platform.chaos import Chaos
    from ebbtide.platform.errors import ConfigError
    from ebbtide.platform.local_nodes import LocalNodes

    chosen = _plan(plan, rate, duration_s, seed)
    if run is None and any(event.at_step is not None for event in chosen.events):
        raise ConfigError(f"{plan}: at_step needs --run, the run whose steps are counted")
    Chaos(
        LocalNodes(address),
        chosen,
        last_step=lambda: None if run is None else _last_step(run),
        tell=_tell_json if as_json else _tell_people,
    ).run()


def _plan(file: Path | None, rate: float | None, duration_s: float, seed: int) -> Plan:
    from ebbtide.platform.chaos_plan import Plan
    from ebbtide.platform.config import load
    from ebbtide.platform.errors import ConfigError

    if file is not None and rate is None:
        return load(file, Plan)
    if rate is not None and file is None:
        if not 0 < rate < math.inf:
            raise ConfigError(f"--rate {rate:g}: must be a number above 0")
        if rate * duration_s / 3600 > _MAX_EVENTS:
            raise ConfigError(
                f"--rate {rate:g} for --duration-s {duration_s:g} is more than {_MAX_EVENTS:,} "
                "events; lower one of them"
            )
        return Plan.at_rate(rate, duration_s, seed=seed)
    raise ConfigError("give either --plan FILE or --rate R")


def _last_step(run: str) -> int | None:
    from ebbtide.train.events import read_events
    from ebbtide.train.history import History

    last = History(read_events(run)).last
    return None if last is None else last.step


def _tell_json(happening: Happening) -> None:
    given = {key: value for key, value in asdict(happening).items() if value is not None}
    typer.echo(json.dumps(given))


def _tell_people(happening: Happening) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(happening.time_s))
    pid = "" if happening.pid is None else f" process {happening.pid}"
    what = happening.why or f"{happening.node}{pid}"
    typer.echo(f"{at} {happening.deed.replace('_', ' ')}: {what}")
