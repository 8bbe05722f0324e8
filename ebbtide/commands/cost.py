"""``ebbtide cost``: what a run has cost so far, by owner, attempt, market and node."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ebbtide.platform.account import Account, Dollars, Total, account, usd_text
from ebbtide.platform.errors import CostError
from ebbtide.platform.ledger import LedgerFault, read_ledger
from ebbtide.platform.meter import Owner
from ebbtide.platform.records import NodeUp
from ebbtide.platform.storage import join, open_storage


def cost(
    run: str = typer.Argument(help="URI of the run, or its name together with --storage."),
    storage: str | None = typer.Option(
        None, "--storage", help="The storage URI of the job file, if RUN is a name."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of tables."),
) -> None:
    """Show what a run has cost, by owner, attempt and instance type. The run may be alive.

    Seconds are node-seconds; "on demand" is what they would have cost at on-demand prices.

    Example: [bold]ebbtide cost stdlib-lm --storage s3://bucket/runs[/bold]
    """
    source = open_storage(run if storage is None else join(storage, run))
    ledger = read_ledger(source)
    if not ledger.records:
        raise CostError(_unreadable(source.uri, ledger.faults))
    result = account(ledger.records, time.time())
    if as_json:
        typer.echo(json.dumps(document(source.uri, result, ledger.faults), indent=2))
        return
    console = Console(soft_wrap=True)
    for table in (_owners(source.uri, result), _attempts(result), _nodes(result)):
        console.print(table)
    for line in _summary(result):
        console.print(line, highlight=False)
    _say_faults(ledger.faults)


def document(run_uri: str, result: Account, faults: Iterable[LedgerFault] = ()) -> dict[str, Any]:
    """The account as plain values; an unknown price is null, and its total ``partial``."""
    total = result.total
    return {
        "run": run_uri,
        "status": result.status,
        "goodput": result.goodput,
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
        "saves_missed": dict(result.saves_missed),
        "ledger_faults": [
            {"key": fault.key, "line": fault.line, "reason": fault.reason} for fault in faults
        ],
    }


def _plain(part: Total, whole: Total) -> dict[str, Any]:
    return {
        "node_seconds": part.seconds,
        "percent": _percent(part, whole),
        "cost_usd": _usd(part.spent),
        "partial": part.spent.partial,
        "cost_on_demand_usd": _usd(part.on_demand),
        "on_demand_partial": part.on_demand.partial,
    }


def _usd(dollars: Dollars) -> float | None:
    return None if dollars.usd is None else float(round(dollars.usd, 9))


def _percent(part: Total, whole: Total) -> float:
    return 100 * part.time_us / whole.time_us if whole.time_us else 0.0


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    return table


def _cells(part: Total, whole: Total) -> list[str]:
    return [
        f"{part.seconds:,.1f}",
        f"{_percent(part, whole):.1f}",
        part.spent.text(whole.spent),
        part.on_demand.text(whole.on_demand),
    ]


_COLUMNS = ("seconds", "%", "cost", "on demand")


def _owners(run_uri: str, result: Account) -> Table:
    table = _table(f"{run_uri} ({result.status})", "owner", *_COLUMNS)
    for owner, part in result.by_owner.items():
        table.add_row(owner.value.replace("_", " "), *_cells(part, result.total))
    table.add_section()
    table.add_row("total", *_cells(result.total, result.total), style="bold")
    return table


def _attempts(result: Account) -> Table:
    by_both = result.by(lambda row: (row.attempt, row.owner))
    table = _table("By attempt", "attempt", *_COLUMNS, "compute %", "lost %")
    for number, part in result.by_attempt.items():
        shares = (
            f"{_percent(by_both.get((number, owner), Total()), part):.1f}"
            for owner in (Owner.COMPUTE, Owner.LOST_WORK)
        )
        name = "before any" if number is None else str(number)
        table.add_row(name, *_cells(part, result.total), *shares)
    return table


def _nodes(result: Account) -> Table:
    def kind(node: NodeUp) -> tuple[str, str, str]:
        price = node.usd_per_hour
        hourly = "unknown" if price is None else f"{price.normalize():f}"
        return node.instance_type or "unknown", node.market.value.replace("_", " "), hourly

    nodes: dict[tuple[str, str, str], set[str]] = {}
    for row in result.rows:
        nodes.setdefault(kind(row.node), set()).add(row.node.node_id)
    table = _table("By instance type", "type", "market", "$/hour", "nodes", *_COLUMNS[:-1])
    for key, part in result.by(lambda row: kind(row.node)).items():
        table.add_row(*key, str(len(nodes[key])), *_cells(part, result.total)[:-1])
    return table


def _summary(result: Account) -> list[str]:
    total = result.total
    lines = []
    if result.goodput is not None:
        lines.append(f"goodput {100 * result.goodput:.1f}% of node time (compute of kept steps)")
    if result.saves_missed:
        counts = ", ".join(f"{count} {why}" for why, count in sorted(result.saves_missed.items()))
        lines.append(f"checkpoints that came to nothing: {counts}")
    spent, on_demand = total.spent.usd, total.on_demand.usd
    if total.spent.partial:
        lines.append(
            f"the total is partial: {total.spent.unpriced_us / 1e6:,.1f} node-seconds have no known"
            " price; put their instance type into the catalogue (cost.catalogue) for the next run"
        )
    elif spent is not None and on_demand not in (None, spent) and not total.on_demand.partial:
        saved = on_demand - spent
        word = "less" if saved >= 0 else "more"
        lines.append(
            f"{usd_text(spent, on_demand)} spent, {usd_text(abs(saved), on_demand)} "
            f"({abs(saved) / on_demand:.0%}) {word} than the same node time on demand"
        )
    return lines


def _unreadable(run_uri: str, faults: tuple[LedgerFault, ...]) -> str:
    text = f"{run_uri}: no line of the ledger could be read"
    if faults:
        first = faults[0]
        text += f"; the first is ledger/{first.key}, line {first.line}: {first.reason}"
    return f"{text}; restore the ledger, or ask for another run"


def _say_faults(faults: tuple[LedgerFault, ...]) -> None:
    if faults:
        first = faults[0]
        Console(stderr=True, soft_wrap=True).print(
            f"warning: {len(faults)} ledger lines could not be read and are left out; the first is "
            f"{first.key}:{first.line}: {first.reason}",
            style="yellow",
            markup=False,
        )
