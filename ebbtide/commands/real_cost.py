"""What ``cost`` says of what is paid beside the nodes, when it is given the rates."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from ebbtide.platform.account import Account, usd_text
from ebbtide.platform.errors import ConfigError
from ebbtide.platform.real_cost import Rates, RealCost, real_cost
from ebbtide.platform.records import Record, Started
from ebbtide.platform.storage import Storage

_MOST = Decimal(10**9)
"""Beyond any price or time; what is multiplied stays within the digits of a Decimal."""


def rate(option: str, text: str) -> Decimal:
    """An amount of 0 or more. Raises ConfigError."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or not 0 <= value <= _MOST:
        raise ConfigError(f"{option} must be a number from 0 to {_MOST:,} (found {text!r})")
    return value


def of_run(
    source: Storage, records: Sequence[Record], result: Account, rates: Rates, now_s: float
) -> RealCost:
    """What the run has cost with everything; what it has stored counts since its first start."""
    started_s = min((r.time_s for r in records if isinstance(r, Started)), default=now_s)
    stored = sum(info.size_bytes for info in source.list())
    return real_cost(result, rates, stored, now_s - started_s)


def line(found: RealCost) -> str:
    """The parts and their sum, for a person."""
    if found.nodes is None or found.total is None:
        return "real cost: unknown, as no node has a known price"
    parts = {
        "of nodes": found.nodes,
        "egress": found.egress,
        "network": found.network,
        "storage": found.storage,
        "engineering": found.engineering,
    }
    texts = [f"{usd_text(usd, found.total)} {name}" for name, usd in parts.items() if usd]
    mark = " (partial)" if found.partial else ""
    return f"real cost {usd_text(found.total)}{mark}: {' + '.join(texts) or 'nothing'}"


def document(found: RealCost) -> dict[str, Any]:
    """The parts as plain values, and whether nodes without a price are left out of them."""
    parts = ("nodes", "egress", "network", "storage", "engineering", "total")
    values = {name: getattr(found, name) for name in parts}
    usd_of = {
        f"{name}_usd": None if usd is None else float(round(usd, 9)) for name, usd in values.items()
    }
    return {**usd_of, "partial": found.partial}
