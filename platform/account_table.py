"""Accounts as a table for analysis: one row for each part of the node time, in CSV or Parquet.

Promises: a price and a cost that are not known are empty (null), never 0; dollars are decimals with
12 places, so that sums over the rows are those of the account to a millionth of a cent.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.platform.account import Account, Dollars

if TYPE_CHECKING:
    import pyarrow

COLUMNS = (
    *("run", "node_id", "instance_type", "market", "zone", "attempt", "epoch", "owner"),
    *("node_seconds", "usd_per_hour", "cost_usd", "cost_on_demand_usd"),
)
_PLACES = Decimal(1).scaleb(-12)


def rows(accounts: Iterable[tuple[str, Account]]) -> list[dict[str, Any]]:
    """The parts of each (run's URI, account)."""
    return [
        {
            "run": run_uri,
            "node_id": row.node.node_id,
            "instance_type": row.node.instance_type,
            "market": row.node.market.value,
            "zone": row.node.zone,
            "attempt": row.attempt,
            "epoch": row.epoch,
            "owner": row.owner.value,
            "node_seconds": row.total.seconds,
            "usd_per_hour": _decimal(row.node.usd_per_hour),
            "cost_usd": _dollars(row.total.spent),
            "cost_on_demand_usd": _dollars(row.total.on_demand),
        }
        for run_uri, account in accounts
        for row in account.rows
    ]


def csv_text(accounts: Iterable[tuple[str, Account]]) -> str:
    """With a header line."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: f"{v.normalize():f}" if isinstance(v, Decimal) else v for name, v in row.items()}
        for row in rows(accounts)
    )
    return text.getvalue()


def write_parquet(path: Path, accounts: Iterable[tuple[str, Account]]) -> None:
    """Write the rows as one Parquet file. Raises OSError."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows(accounts), schema=_schema())
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(table, path)


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    usd, text, number = pa.decimal128(38, 12), pa.string(), pa.int64()
    kinds: dict[str, pa.DataType] = dict.fromkeys(COLUMNS, text)
    kinds |= {"attempt": number, "epoch": number, "node_seconds": pa.float64()}
    kinds |= dict.fromkeys(("usd_per_hour", "cost_usd", "cost_on_demand_usd"), usd)
    return pa.schema(list(kinds.items()))


def _dollars(dollars: Dollars) -> Decimal | None:
    return _decimal(dollars.usd)


def _decimal(usd: Decimal | None) -> Decimal | None:
    return None if usd is None else usd.quantize(_PLACES, ROUND_HALF_EVEN)
