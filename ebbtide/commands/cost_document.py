"""What a run has cost as plain values: the documents of ``ebbtide cost --json``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ebbtide.commands.cost_tables import percent, shares
from ebbtide.commands.run_books import figures
from ebbtide.platform.account import Account, Dollars, Total
from ebbtide.platform.ledger import LedgerFault


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
        **plain(total, total),
        "owners": {owner.value: plain(part, total) for owner, part in result.by_owner.items()},
        "markets": {
            market.value: plain(part, total)
            for market, part in result.by(lambda row: row.node.market).items()
        },
        "attempts": [
            {"attempt": number, **plain(part, total)} for number, part in result.by_attempt.items()
        ],
        "epochs": [
            {"epoch": number, **plain(part, total)} for number, part in result.by_epoch.items()
        ],
        "nodes": [
            {
                **node.model_dump(mode="json", exclude={"kind", "time_s"}),
                "from_s": node.time_s,
                **plain(part, total),
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


def plain(part: Total, whole: Total) -> dict[str, Any]:
    """A part of the node time, and what it has cost."""
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
