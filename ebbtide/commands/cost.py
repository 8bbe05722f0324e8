"""``ebbtide cost``: what a run has cost so far, by owner, attempt, epoch, market and node."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ebbtide.commands import real_cost as real
from ebbtide.commands.cost_tables import (
    COLUMNS,
    attempts,
    cells,
    epochs,
    keys,
    nodes,
    owners,
    percent,
    shares,
    summary,
    table,
    trials,
)
from ebbtide.commands.run_books import (
    events_of,
    figures,
    ledger_of,
    lines,
    runs_under,
    tokens_of,
)
from ebbtide.platform.account import Account, Dollars, Total, account
from ebbtide.platform.account_table import csv_text, write_parquet
from ebbtide.platform.errors import ConfigError, CostError
from ebbtide.platform.ledger import LedgerFault
from ebbtide.platform.real_cost import Rates
from ebbtide.platform.storage import Storage, join, open_storage


def cost(
    run: str | None = typer.Argument(
        None, help="URI of the run, or its name together with --storage."
    ),
    storage: str | None = typer.Option(
        None, "--storage", help="The storage URI of the job file, if RUN is a name."
    ),
    every: bool = typer.Option(False, "--all", help="Every run under --storage, one a line."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of tables."),
    as_csv: bool = typer.Option(
        False, "--csv", help="Comma-separated: node time by node, attempt, epoch and owner."
    ),
    parquet: Path | None = typer.Option(
        None, "--parquet", help="Write the rows of --csv to this Parquet file, too."
    ),
    network: str = typer.Option(
        "0", "--network-factor", help="What the network adds to the nodes' price: 0.2 is 20%."
    ),
    storage_price: str = typer.Option(
        "0", "--storage-usd-per-gb-month", help="Price of what the run has stored."
    ),
    engineering_rate: str = typer.Option(
        "0", "--engineering-usd-per-hour", help="Price of an engineer's hour."
    ),
    engineering_hours: str = typer.Option(
        "0", "--engineering-hours", help="Hours that the run took of engineers' time."
    ),
) -> None:
    """Show what a run has cost, by owner, attempt, epoch and instance type. The run may be alive.

    Seconds are node-seconds; "on demand" is what they would have cost at on-demand prices.

    With a price of network, storage or engineers it also shows the run's real cost.

    Example: [bold]ebbtide cost stdlib-lm --storage s3://bucket/runs[/bold]
    """
    if as_json and as_csv:
        raise ConfigError("--json and --csv are two forms of one answer; give one of them")
    if every == (run is not None) or (every and storage is None):
        raise ConfigError("name one RUN, or give --all with --storage")
    rates = Rates(
        real.rate("--network-factor", network),
        real.rate("--storage-usd-per-gb-month", storage_price),
        real.rate("--engineering-usd-per-hour", engineering_rate),
        real.rate("--engineering-hours", engineering_hours),
    )
    if bool(rates.engineering_usd_per_hour) != bool(rates.engineering_hours):
        raise ConfigError("--engineering-usd-per-hour and --engineering-hours go together")
    if rates.given and as_csv:
        raise ConfigError("--csv has the nodes' rows only; see the real cost without it")
    if every and storage is not None:
        if rates.given:
            raise ConfigError("the real cost is shown of one run; leave --all out")
        _every(storage, as_json, as_csv, parquet)
        return
    source = open_storage(str(run) if storage is None else join(storage, str(run)))
    ledger = ledger_of(source)
    now_s = time.time()
    result = account(ledger.records, now_s)
    tokens = _tokens(source, result)
    whole = real.of_run(source, ledger.records, result, rates, now_s) if rates.given else None
    _write(parquet, [(source.uri, result)])
    if as_json:
        shown_of = document(source.uri, result, ledger.faults, tokens)
        if whole is not None:
            shown_of["real_cost"] = real.document(whole)
        typer.echo(json.dumps(shown_of, indent=2))
        return
    if as_csv:
        typer.echo(csv_text([(source.uri, result)]), nl=False)
        return
    console = Console(soft_wrap=True)
    by_part = (
        *([] if result.served else [attempts(result)]),
        *epochs(result),
        *trials(result),
        *keys(result),
        nodes(result),
    )
    for shown in (owners(source.uri, result), *by_part):
        console.print(shown)
    for line in (*summary(result), *lines(result, tokens)):
        console.print(line, highlight=False)
    if whole is not None:
        console.print(real.line(whole), highlight=False)
    _say_faults(ledger.faults)


def _tokens(source: Storage, result: Account) -> int:
    return tokens_of(events_of(source)[1], result)


def _every(storage: str, as_json: bool, as_csv: bool, parquet: Path | None) -> None:
    """What all runs under a storage have cost."""
    root, now_s = open_storage(storage), time.time()
    names = runs_under(root)
    if not names:
        raise CostError(f"{root.uri}: no run with a ledger here; give the storage of a job file")
    results = [(name, account(ledger_of(root.child(name)).records, now_s)) for name in names]
    by_uri = [(join(root.uri, name), result) for name, result in results]
    _write(parquet, by_uri)
    if as_csv:
        typer.echo(csv_text(by_uri), nl=False)
        return
    whole = sum((result.total for _, result in results), Total())
    if as_json:
        runs = [
            document(join(root.uri, name), result, tokens=_tokens(root.child(name), result))
            for name, result in results
        ]
        typer.echo(json.dumps({**_plain(whole, whole), "runs": runs}, indent=2))
        return
    shown = table(f"Runs under {root.uri}", "run", "status", *COLUMNS, "goodput %")
    for name, result in results:
        goodput = "-" if result.goodput is None else f"{100 * result.goodput:.1f}"
        shown.add_row(name, result.status, *cells(result.total, whole), goodput)
    shown.add_section()
    shown.add_row("total", "", *cells(whole, whole), "", style="bold")
    Console(soft_wrap=True).print(shown)


def _write(parquet: Path | None, accounts: Sequence[tuple[str, Account]]) -> None:
    if parquet is None:
        return
    try:
        write_parquet(parquet, accounts)
    except OSError as error:
        raise ConfigError(f"{parquet}: cannot be written: {error}; give --parquet FILE") from error


def document(
    run_uri: str, result: Account, faults: Iterable[LedgerFault] = (), tokens: int = 0
) -> dict[str, Any]:
    """The account as plain values; an unknown price is null, and its total ``partial``."""
    total, found = result.total, figures(result, tokens)
    per_token = found.usd_per_million_tokens
    return {
        "run": run_uri,
        "status": result.status,
        "goodput": result.goodput,
        "tokens": tokens or None,
        "usd_per_million_tokens": None if per_token is None else float(round(per_token, 9)),
        "egress_gb": result.egress_bytes / 1e9,
        "egress_usd": float(round(result.egress_usd, 9)),
        "cost_without_stalls_usd": _usd(result.without_stalls.spent),
        **_plain(total, total),
        "owners": {owner.value: _plain(part, total) for owner, part in result.by_owner.items()},
        "markets": {
            market.value: _plain(part, total)
            for market, part in result.by(lambda row: row.node.market).items()
        },
        "attempts": [
            {"attempt": number, **_plain(part, total)} for number, part in result.by_attempt.items()
        ],
        "epochs": [
            {"epoch": number, **_plain(part, total)} for number, part in result.by_epoch.items()
        ],
        "nodes": [
            {
                **node.model_dump(mode="json", exclude={"kind", "time_s"}),
                "from_s": node.time_s,
                **_plain(part, total),
            }
            for node, part in result.by(lambda row: row.node).items()
        ],
        "trials": [
            trial.model_dump(mode="json", include={"number", "status", "seconds", "usd"})
            for trial in result.trials
        ],
        "keys": [
            {
                **each.model_dump(mode="json", exclude={"kind", "time_s"}),
                "cost_usd": None if share is None else float(round(share, 9)),
            }
            for each, share in shares(result)
        ],
        "startup_saved_s": result.startup_saved_s,
        "saves_missed": dict(result.saves_missed),
        "ledger_faults": [
            {"key": fault.key, "line": fault.line, "reason": fault.reason} for fault in faults
        ],
    }


def _plain(part: Total, whole: Total) -> dict[str, Any]:
    return {
        "node_seconds": part.seconds,
        "percent": percent(part, whole),
        "cost_usd": _usd(part.spent),
        "partial": part.spent.partial,
        "cost_on_demand_usd": _usd(part.on_demand),
        "on_demand_partial": part.on_demand.partial,
    }


def _usd(dollars: Dollars) -> float | None:
    return None if dollars.usd is None else float(round(dollars.usd, 9))


def _say_faults(faults: tuple[LedgerFault, ...]) -> None:
    if faults:
        first = faults[0]
        Console(stderr=True, soft_wrap=True).print(
            f"warning: {len(faults)} ledger lines could not be read and are left out; the first is "
            f"{first.key}:{first.line}: {first.reason}",
            style="yellow",
            markup=False,
        )
