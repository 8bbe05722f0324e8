"""``ebbtide prices``: what instances cost, by the catalogue and by AWS itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ebbtide.platform.errors import CostError
from ebbtide.platform.prices import Catalogue, InstanceType, Market, load_catalogue

if TYPE_CHECKING:
    from ebbtide.platform.aws_prices import AwsPrices


def prices(
    types: list[str] = typer.Argument(None, help="Instance types. Default: all of the catalogue."),
    catalogue: Path | None = typer.Option(
        None, "--catalogue", help="A catalogue of yours. Default: the one that ebbtide ships."
    ),
    live: bool = typer.Option(
        False, "--live", help="Ask AWS, too: on demand, and spot by zone, in AWS_REGION."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON document instead of a table."),
) -> None:
    """Show prices of instance types, with the source and date of each.

    Live prices need AWS credentials; they are kept for five minutes (spot) or a day.

    Example: [bold]ebbtide prices p5.48xlarge g6.xlarge --live[/bold]
    """
    known = load_catalogue(catalogue)
    names = types or sorted(known.instance_types)
    aws = _live(names, known, named=bool(types)) if live else None
    unknown = [name for name in names if name not in known.instance_types]
    if unknown and aws is None:
        raise CostError(
            f"{', '.join(unknown)}: not in the catalogue; add it to a copy of it (--catalogue), "
            "or ask AWS with --live"
        )
    rows = [_row(name, known, aws) for name in names]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console(soft_wrap=True).print(_table(rows, aws))


def _live(names: Iterable[str], known: Catalogue, named: bool) -> AwsPrices:
    from ebbtide.platform.aws_prices import AwsPrices

    aws = AwsPrices()
    entries = known.instance_types
    aws.refresh([n for n in names if named or entries[n].provider == "aws"])
    return aws


def _row(name: str, known: Catalogue, aws: AwsPrices | None) -> dict[str, Any]:
    entry: InstanceType | None = known.instance_types.get(name)
    row: dict[str, Any] = {
        "instance_type": name,
        "provider": entry.provider if entry else "aws",
        "gpus": f"{entry.gpus} {entry.gpu}" if entry and entry.gpus else None,
        **{market.value: _plain(known.price(name, market)) for market in Market},
        "spot_by_zone": _by_zone(entry),
        "source": entry.source if entry else None,
        "date": str(entry.date) if entry else None,
    }
    if aws is not None:
        row["live_region"] = aws.region
        row["live_on_demand"] = _plain(aws.price(name, Market.ON_DEMAND, None))
        row["live_spot"] = {zone: _plain(usd) for zone, usd in sorted(aws.zones(name).items())}
    return row


def _by_zone(entry: InstanceType | None) -> dict[str, float | None]:
    zones = entry.usd_per_hour.spot_by_zone if entry and entry.usd_per_hour else None
    return {zone: _plain(usd) for zone, usd in sorted((zones or {}).items()) if usd is not None}


def _plain(usd: Decimal | None) -> float | None:
    return None if usd is None else float(usd)


def _table(rows: Iterable[dict[str, Any]], aws: AwsPrices | None) -> Table:
    table = Table(title="Dollars an hour", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("type", "GPUs", "on demand", "spot", "on prem", "source", "date"):
        table.add_column(name, justify="right" if name in ("on demand", "spot") else "left")
    if aws is not None:
        table.add_column(f"on demand now, {aws.region}", justify="right")
        table.add_column("spot now, by zone")
    for row in rows:
        texts = [row["instance_type"], row["gpus"] or "-"]
        texts += [_usd(row[each]) for each in ("on_demand", "spot", "on_prem")]
        if row["spot_by_zone"]:
            texts[3] += f" ({', '.join(f'{z} {usd:g}' for z, usd in row['spot_by_zone'].items())})"
        texts += [row["source"] or "-", row["date"] or "-"]
        if aws is not None:
            zones = row["live_spot"].items()
            spot = ", ".join(f"{zone.removeprefix(aws.region)} {usd:g}" for zone, usd in zones)
            texts += [_usd(row["live_on_demand"]), spot or "unknown"]
        table.add_row(*texts)
    return table


def _usd(usd: float | None) -> str:
    return "unknown" if usd is None else f"{usd:g}"
