"""``ebbtide simulate``: policies replayed over spot traces, and a forecast before a launch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ebbtide.platform import config
from ebbtide.platform.errors import ConfigError, DataError
from ebbtide.platform.market.baselines import PricePause
from ebbtide.platform.market.forecast import Choice, Forecast, ForecastConfig, Spread, forecast
from ebbtide.platform.market.policy import Policy
from ebbtide.platform.market.study import POLICIES, Job, Result, Study, draw_windows
from ebbtide.platform.market.traces import Trace, align, read_sets
from ebbtide.platform.prices import Market

DEFAULT_POLICIES = ["tide", "on_demand", "greedy", "spot_with_fallback", "uniform_progress"]
_NAMES = ", ".join(POLICIES)


def simulate(
    traces: list[Path] = typer.Argument(None, help="Traces, or folders of them.", show_default=""),
    job: Path | None = typer.Option(
        None, "--job", help="Forecast this job file instead of replaying traces."
    ),
    policy: list[str] = typer.Option(
        DEFAULT_POLICIES, "--policy", help=f"Again for more: {_NAMES}."
    ),
    zone: list[str] = typer.Option(
        [], "--zone", help="Use this zone of each set (again for more); default: all of a set."
    ),
    nodes: int = typer.Option(1, "--nodes", min=1, help="Nodes the job needs at once."),
    work: float = typer.Option(48.0, "--work", help="Hours of work."),
    deadline: float = typer.Option(60.0, "--deadline", help="Hours until it must be done."),
    restart: float = typer.Option(0.217, "--restart", help="Hours a start takes."),
    on_demand: float = typer.Option(3.0, "--on-demand", help="On-demand price, $/hour of a node."),
    spot: float = typer.Option(1.0, "--spot", help="Spot price where a trace has none."),
    pause_above: float | None = typer.Option(
        None, "--pause-above", help="Price above which price_pause waits."
    ),
    windows: int = typer.Option(100, "--windows", min=1, max=100_000, help="Windows of each set."),
    learn: float = typer.Option(
        0.5, "--learn", min=0.0, max=0.95, help="Share of a trace to learn from; windows lie after."
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="Of the windows drawn."),
    picture: Path | None = typer.Option(
        None, "--picture", help="Draw the first window (.svg or .png)."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of tables."),
) -> None:
    """Replay policies over spot traces, with the clairvoyant optimum beside them; or, with --job,
    forecast what a job will cost and when it will finish, by policy and zones.

    Example: [bold]ebbtide simulate traces/ --policy tide --policy greedy --picture day.svg[/bold]
    """
    if job is not None:
        if traces:
            raise ConfigError("give TRACES or --job, not both; a job file names its traces")
        made = forecast(config.load(job, ForecastConfig), job.parent)
        _show_forecast(made, as_json)
        return
    if picture is not None and (picture.suffix not in (".svg", ".png") or picture.is_dir()):
        raise ConfigError(f"--picture {picture}: name a file that ends in .svg or .png")
    if not traces:
        raise ConfigError("nothing to simulate: name a folder of TRACES, or a job with --job FILE")
    policies = [_policy(name, pause_above) for name in dict.fromkeys(policy)]
    asked = _job(work, deadline, restart, on_demand, spot, nodes)
    documents, drawn = [], False
    for name, found in read_sets(traces).items():
        chosen = [trace for trace in found if not zone or trace.zone in zone]
        if not chosen:
            continue
        study = draw_windows(
            asked, align(chosen, asked.tick_s), windows, np.random.default_rng(seed), learn
        )
        if not study.windows:
            documents.append({"set": name, "too_short": True, "zones": _names(chosen)})
            continue
        results = _run(study, policies, keep=picture is not None and not drawn)
        documents.append(_document(name, chosen, study, results))
        if picture is not None and not drawn:
            _draw(picture, study, results)
            drawn = True
    if not any("policies" in document for document in documents):
        raise DataError(_nothing(documents, zone, learn, deadline))
    _show(documents, as_json)


def _policy(name: str, pause_above: float | None) -> Policy:
    if name not in POLICIES:
        raise ConfigError(f"--policy {name}: known are {', '.join(POLICIES)}")
    if name != "price_pause":
        return POLICIES[name]
    if pause_above is None:
        raise ConfigError("--policy price_pause needs --pause-above, in dollars an hour of a node")
    return PricePause(_positive("--pause-above", pause_above))


def _positive(option: str, value: float) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{option} must be a number above 0 (found {value:g})")
    return value


def _job(
    work: float, deadline: float, restart: float, on_demand: float, spot: float, nodes: int
) -> Job:
    if not math.isfinite(restart) or restart < 0:
        raise ConfigError(f"--restart must be a number of 0 or more (found {restart:g})")
    job = Job(
        _positive("--work", work) * 3600,
        _positive("--deadline", deadline) * 3600,
        restart * 3600,
        _positive("--on-demand", on_demand),
        _positive("--spot", spot),
        nodes,
    )
    if problem := job.impossible():
        raise ConfigError(f"--work, --deadline, --restart: {problem}")
    return job


def _run(study: Study, policies: list[Policy], keep: bool) -> dict[str, Result]:
    least = study.optimum()
    return {policy.name: study.run(policy, least, keep=keep) for policy in policies}


def _draw(path: Path, study: Study, results: dict[str, Result]) -> None:
    from ebbtide.platform.market.picture import draw  # matplotlib is slow to import

    first = {name: result.outcomes[0] for name, result in results.items()}
    draw(path, study.terms, study.windows[0], first)


def _names(traces: list[Trace]) -> list[str]:
    return [trace.zone for trace in traces]


def _document(
    name: str, zones: list[Trace], study: Study, results: dict[str, Result]
) -> dict[str, Any]:
    least = next(iter(results.values())).optimum_usd
    return {
        "set": name,
        "zones": _names(zones),
        "windows": len(study.windows),
        "tick_s": study.terms.tick_s,
        "optimum_usd": float(np.mean(least)),
        "policies": {name: _figures(result) for name, result in results.items()},
    }


def _figures(result: Result) -> dict[str, Any]:
    outcomes = result.outcomes
    hours = {
        market.value: float(np.mean([outcome.hours[market] for outcome in outcomes]))
        for market in Market
    }
    ratios = [ratio for ratio in result.over_optimum if math.isfinite(ratio)]
    return {
        "usd": float(np.mean([outcome.usd for outcome in outcomes])),
        "over_optimum": float(np.mean(ratios)) if ratios else None,
        "deadline_misses": result.misses,
        "starts": float(np.mean([outcome.starts for outcome in outcomes])),
        "evictions": float(np.mean([outcome.evictions for outcome in outcomes])),
        "node_hours": hours,
    }


def _nothing(documents: list[dict[str, Any]], zone: list[str], learn: float, hours: float) -> str:
    if documents:
        return (
            f"no trace is long enough: after the share to learn from ({learn:g}) none holds a "
            f"window of {hours:g} h; give longer traces, a lower --learn or a shorter --deadline"
        )
    return f"no set has a zone named {' or '.join(zone)}; leave --zone out to see the names"


def _show(documents: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"sets": documents}, indent=2))
        return
    console = Console(soft_wrap=True)
    for document in documents:
        if "policies" not in document:
            console.print(f"{document['set']}: too short, left out", style="yellow", markup=False)
            continue
        title = f"{document['set']}: {', '.join(document['zones'])}; {document['windows']} windows"
        table = Table(title=title, title_justify="left", box=box.SIMPLE)
        table.add_column("policy", no_wrap=True)
        for column in ("cost", "x optimum", "missed", "evicted", "spot h", "o-d h"):
            table.add_column(column, justify="right")
        for name, row in document["policies"].items():
            table.add_row(name, *_cells(row))
        table.add_row("(optimum)", f"${document['optimum_usd']:,.2f}", "1.000")
        console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    over = row["over_optimum"]
    return [
        f"${row['usd']:,.2f}",
        "-" if over is None else f"{over:.3f}",
        str(row["deadline_misses"]),
        f"{row['evictions']:.1f}",
        f"{row['node_hours']['spot']:,.1f}",
        f"{row['node_hours']['on_demand']:,.1f}",
    ]


def _show_forecast(made: Forecast, as_json: bool) -> None:
    if as_json:
        document = {
            "best": asdict(made.best),
            "on_demand": asdict(made.on_demand) if made.on_demand else None,
            "choices": [asdict(choice) for choice in made.choices],
            "sources": dict(made.sources),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    table = Table(
        title="Forecast, the best first: medians, and between what 80% of the samples lie",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for column in ("policy", "zones"):
        table.add_column(column, no_wrap=True)
    for column in ("cost", "80%", "done", "80%", "in time"):
        table.add_column(column, justify="right", no_wrap=True)
    for choice in made.choices:
        zones = _zones(choice, len(made.sources))
        table.add_row(choice.policy, zones, *_choice_cells(choice))
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(_advice(made), highlight=False, markup=False)
    for name, source in made.sources.items():
        console.print(f"{name}: {source}", highlight=False, markup=False, style="dim")


def _choice_cells(choice: Choice) -> list[str]:
    hours = ("-", "-")
    if choice.hours is not None:
        hours = (f"{choice.hours.median:.1f} h", _interval(choice.hours, "{:.1f}"))
    cost = f"${choice.usd.median:,.2f}"
    form = "{:,.0f}" if choice.usd.low >= 20 else "{:,.2f}"
    return [cost, _interval(choice.usd, form), *hours, f"{choice.chance:.0%}"]


def _interval(spread: Spread, form: str) -> str:
    return f"{form.format(spread.low)}-{form.format(spread.high)}"


def _zones(choice: Choice, known: int) -> str:
    if not choice.zones:
        return "-"
    return choice.zones[0] if len(choice.zones) == 1 else f"all {known}"


def _advice(made: Forecast) -> str:
    best, full = made.best, made.on_demand
    text = f"best: {best.policy}"
    if best.zones:
        text += f" in {', '.join(best.zones)}"
    if full is None or full is best:
        return text
    saved = 1 - best.mean_usd / full.mean_usd
    return f"{text}: {saved:.0%} less than on-demand (${full.mean_usd:,.2f}), on average"
