"""``ebbtide cost``: what a run has cost so far, by owner, attempt, epoch, market and node."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from ebbtide.commands import real_cost as real
from ebbtide.commands.cost_document import document, plain
from ebbtide.commands.cost_tables import (
    COLUMNS,
    attempts,
    cells,
    epochs,
    keys,
    nodes,
    owners,
    summary,
    table,
    trials,
)
from ebbtide.commands.run_books import (
    events_of,
    ledger_of,
    lines,
    runs_under,
    tokens_of,
)
from ebbtide.platform.account import Account, Total, account
from ebbtide.platform.account_table import csv_text, write_parquet
from ebbtide.platform.errors import ConfigError, CostError
from ebbtide.platform.ledger import LedgerFault
from ebbtide.platform.real_cost import Rates, RealCost
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
    rates = _rates(network, storage_price, engineering_rate, engineering_hours)
    if rates.given and as_csv:
        raise ConfigError("--csv has the nodes' rows only; see the real cost without it")
    if rates.given and every:
        raise ConfigError("the real cost is shown of one run; leave --all out")
    if every and storage is not None:
        _every(storage, as_json, as_csv, parquet)
    else:
        uri = str(run) if storage is None else join(storage, str(run))
        _one(uri, as_json, as_csv, parquet, rates)


def _rates(network: str, storage: str, engineering: str, hours: str) -> Rates:
    """The rates as they were given. Raises ConfigError."""
    rates = Rates(
        real.rate("--network-factor", network),
        real.rate("--storage-usd-per-gb-month", storage),
        real.rate("--engineering-usd-per-hour", engineering),
        real.rate("--engineering-hours", hours),
    )
    if bool(rates.engineering_usd_per_hour) != bool(rates.engineering_hours):
        raise ConfigError("--engineering-usd-per-hour and --engineering-hours go together")
    return rates


def _one(uri: str, as_json: bool, as_csv: bool, parquet: Path | None, rates: Rates) -> None:
    """What one run has cost."""
    source = open_storage(uri)
    ledger = ledger_of(source)
    now_s = time.time()
    result = account(ledger.records, now_s)
    tokens = _tokens(source, result)
    whole = real.of_run(source, ledger.records, result, rates, now_s) if rates.given else None
    _write(parquet, [(source.uri, result)])
    if as_json:
        shown = document(source.uri, result, ledger.faults, tokens)
        if whole is not None:
            shown["real_cost"] = real.document(whole)
        typer.echo(json.dumps(shown, indent=2))
    elif as_csv:
        typer.echo(csv_text([(source.uri, result)]), nl=False)
    else:
        _print(source.uri, result, tokens, whole)
        _say_faults(ledger.faults)


def _print(uri: str, result: Account, tokens: int, whole: RealCost | None) -> None:
    """The tables of one run, and the lines below them."""
    console = Console(soft_wrap=True)
    by_part = (
        *([] if result.served else [attempts(result)]),
        *epochs(result),
        *trials(result),
        *keys(result),
        nodes(result),
    )
    for shown in (owners(uri, result), *by_part):
        console.print(shown)
    for line in (*summary(result), *lines(result, tokens)):
        console.print(line, highlight=False)
    if whole is not None:
        console.print(real.line(whole), highlight=False)


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
        typer.echo(json.dumps({**plain(whole, whole), "runs": runs}, indent=2))
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


def _say_faults(faults: tuple[LedgerFault, ...]) -> None:
    if faults:
        first = faults[0]
        Console(stderr=True, soft_wrap=True).print(
            f"warning: {len(faults)} ledger lines could not be read and are left out; the first is "
            f"{first.key}:{first.line}: {first.reason}",
            style="yellow",
            markup=False,
        )
