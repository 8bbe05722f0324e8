"""``ebbtide report``: a run on one page, to look at and to send on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import typer

from ebbtide.commands.run_books import events_of, figures, ledger_of, tokens_of
from ebbtide.platform import page
from ebbtide.platform.account import Account, account, usd_text
from ebbtide.platform.charts import Event as Mark
from ebbtide.platform.errors import ConfigError, CostError
from ebbtide.platform.page import Series
from ebbtide.platform.storage import join, open_storage
from ebbtide.train.desk import OWN_WILL
from ebbtide.train.events import (
    Event,
    Failed,
    LeaveAsked,
    MarketChange,
    NodeLost,
    Notice,
    Skipped,
    Step,
)
from ebbtide.train.failures import Cause
from ebbtide.train.history import History

_NOTICE, _LOSS, _GROWTH, _STOP = "#c98500", "#d55e00", "#009e73", "#222222"


def report(
    run: str = typer.Argument(help="URI of the run, or its name together with --storage."),
    storage: str | None = typer.Option(
        None, "--storage", help="The storage URI of the job file, if RUN is a name."
    ),
    out: Path = typer.Option(Path("report.html"), "--out", help="The HTML file to write."),
) -> None:
    """Write a run's page: loss, events, world size, where seconds and dollars went, what to fix.

    One HTML file that loads nothing. The run may be alive.

    Example: [bold]ebbtide report stdlib-lm --storage s3://bucket/runs --out run.html[/bold]
    """
    source = open_storage(run if storage is None else join(storage, run))
    ledger, now_s = ledger_of(source), time.time()
    events, history = events_of(source)
    result = account(ledger.records, now_s)
    if result.served and not events:
        raise CostError(f"{source.uri}: is an endpoint's; `ebbtide cost` shows it by key")
    text = page.page(
        source.uri, ledger.records, now_s, series(events, history), list(facts(result, history))
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}; give --out") from error
    typer.echo(str(out))


def facts(result: Account, history: History) -> Iterator[tuple[str, str]]:
    """What the page's head says: (name, figure)."""
    total = result.total
    found = figures(result, tokens_of(history, result))
    yield "cost", total.spent.text()
    if result.transfers:
        yield "egress", usd_text(result.egress_usd)
    yield "on demand", total.on_demand.text()
    if result.goodput is not None:
        yield "goodput", f"{100 * result.goodput:.1f}%"
    yield "stalls, restarts, idle", found.stalls.text(total.spent)
    if found.usd_per_million_tokens is not None:
        yield "per 1M tokens", usd_text(found.usd_per_million_tokens)
    if found.usd_per_epoch is not None:
        yield "per epoch", usd_text(found.usd_per_epoch)
    yield "node-hours", f"{total.seconds / 3600:,.2f}"
    if history.last is not None:
        yield "steps", f"{max(history.kept):,}"
        yield "attempts", str(len(history.attempts))
        yield "steps made again", str(history.steps_lost())


def series(events: Iterable[Event], history: History) -> Series:
    """What the page draws of the run's events."""
    events = list(events)
    return Series(
        losses=[(number, history.kept[number].loss) for number in sorted(history.kept)],
        validation=[(event.step, event.loss) for event in events if event.kind == "validation"],
        marks=list(_marks(events)),
        workers=[(attempt.began_s, attempt.world_size) for attempt in history.attempts],
        market=[_decision(event) for event in events if isinstance(event, MarketChange)],
    )


def _decision(event: MarketChange) -> tuple[str, str, str]:
    when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event.time_s))
    where = " ".join(filter(None, (event.market, event.zone))).replace("_", "-")
    return when, where or "nowhere", event.reason


def _marks(events: Iterable[Event]) -> Iterator[Mark]:
    step = 0
    for event in events:
        match event:
            case Step():
                step = event.step
            case Notice():
                yield Mark(step, f"notice {event.node[:8]}", _NOTICE)
            case NodeLost() if not event.announced:
                yield Mark(step, f"node lost {event.node[:8]}", _LOSS)
            case LeaveAsked() if not event.reason.startswith("notice"):
                kind = event.reason.partition(":")[0]
                yield Mark(step, kind, _GROWTH if kind in OWN_WILL else _STOP)
            case Failed() if event.cause != Cause.NODE_LOST:
                yield Mark(step, event.cause, _LOSS)
            case Skipped():
                yield Mark(step, f"batch {event.step} left out", _LOSS)
            case _:
                pass
