"""The page of a run: one HTML file that loads nothing, neither script nor font nor picture.

Promises: what users named (runs, nodes, messages) is escaped; a figure that is not known is said to
be unknown; an empty run gives a page, too. Pure: records and series go in, text comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ebbtide.platform import timeline
from ebbtide.platform.account import Account, account
from ebbtide.platform.advice import advice, market_text
from ebbtide.platform.charts import Event, bar_chart, line_chart, stacked_chart, step_chart
from ebbtide.platform.meter import Owner
from ebbtide.platform.records import Epoch, Record

COLOURS = {
    Owner.COMPUTE: "#009e73",
    Owner.DATA_STALL: "#e69f00",
    Owner.NETWORK_STALL: "#56b4e9",
    Owner.CHECKPOINT_STALL: "#cc79a7",
    Owner.RESTART: "#d55e00",
    Owner.LOST_WORK: "#8b1a1a",
    Owner.VALIDATION: "#0072b2",
    Owner.IDLE: "#bbbbbb",
}
_BINS = 60

_STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#222;max-width:900px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.05rem;margin:2rem 0 .4rem}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#444}
table{border-collapse:collapse;margin:.4rem 0}td,th{padding:.15rem .9rem .15rem 0;text-align:right}
td:first-child,th:first-child{text-align:left}th{border-bottom:1px solid #999;font-weight:600}
.why{text-align:left}
.facts{display:flex;flex-wrap:wrap;gap:.6rem 2rem;margin:1rem 0}
.facts b{display:block;font-size:1.15rem}
.key i{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .9em}li{margin:.3rem 0}
"""


@dataclass(frozen=True)
class Series:
    """What the run's events say: losses by step, and the workers of each attempt by time (s)."""

    losses: Sequence[tuple[float, float]] = ()
    validation: Sequence[tuple[float, float]] = ()
    marks: Sequence[Event] = ()
    workers: Sequence[tuple[float, float]] = ()
    market: Sequence[tuple[str, str, str]] = ()
    """When the market's policy changed its mind, where it wanted the nodes then, and why."""


def over_time(records: Sequence[Record], now_s: float) -> tuple[list[float], list[Account]]:
    """The run's node time cut into equal bins: their edges (epoch seconds), and their accounts."""
    stays = timeline.stays(records, now_s)
    if not stays:
        return [], []
    first = min(stay.start_us for stay in stays) / 1e6
    last = max(stay.end_us for stay in stays) / 1e6
    edges = [first + (last - first) * n / _BINS for n in range(_BINS + 1)]
    cut: list[Record] = [record for record in records if not isinstance(record, Epoch)]
    cut += [Epoch(index=n, start_s=edge) for n, edge in enumerate(edges[:-1])]
    whole = account(cut, now_s)
    rows = {n: tuple(row for row in whole.rows if row.epoch == n) for n in range(_BINS)}
    return edges, [Account(rows[n], whole.status) for n in range(_BINS)]


def page(
    title: str,
    records: Sequence[Record],
    now_s: float,
    series: Series,
    facts: Sequence[tuple[str, str]],
) -> str:
    """The HTML of a run's page; ``facts`` are (name, figure) pairs for its head."""
    result = account(records, now_s)
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(result.status)}</p>",
        '<div class="facts">',
        *(f"<div>{escape(name)}<b>{escape(figure)}</b></div>" for name, figure in facts),
        "</div>",
        _section("What to fix first", _advice(result)),
        _section("Loss", _loss(series)),
        *_by_time(records, now_s, series),
        *([_section("Where the nodes were wanted", _market(series))] if series.market else []),
        _section("Dollars per epoch", _epochs(result)),
        _section("Node time by owner", _owners(result)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _advice(result: Account) -> str:
    found = [each.text(result.total.spent) for each in advice(result)]
    market = market_text(result)
    found += [market] if market else []
    if not found:
        return "<p>Nothing: no part of the node time beside compute is worth a percent.</p>"
    return f"<ol>{''.join(f'<li>{escape(text)}</li>' for text in found)}</ol>"


def _loss(series: Series) -> str:
    if not series.losses:
        return "<p>No step is known.</p>"
    return line_chart(
        series.losses,
        dots=series.validation,
        events=series.marks,
        x_label="step",
        y_label="loss, nats per token (dots: validation)",
    )


def _by_time(records: Sequence[Record], now_s: float, series: Series) -> list[str]:
    edges_s, bins = over_time(records, now_s)
    if not edges_s:
        return []
    unit_s, unit = (3600, "hours") if edges_s[-1] - edges_s[0] > 7200 else (60, "minutes")
    edges = [(edge - edges_s[0]) / unit_s for edge in edges_s]
    stacked = [
        (
            owner.value.replace("_", " "),
            COLOURS[owner],
            [each.by_owner[owner].seconds / ((edges_s[1] - edges_s[0]) or 1) for each in bins],
        )
        for owner in Owner
    ]
    key = "".join(f'<i style="background:{colour}"></i>{name}' for name, colour, _ in stacked)
    x_label = f"{unit} since the first node"
    time = stacked_chart(edges, stacked, x_label=x_label, y_label="nodes, by what they did")
    found = [_section("Where the seconds went", f'<p class="key">{key}</p>{time}')]
    if series.workers:
        levels = [((at_s - edges_s[0]) / unit_s, size) for at_s, size in series.workers]
        chart = step_chart(levels, max(edges[-1], levels[-1][0]), x_label=x_label, y_label="ranks")
        found.insert(0, _section("World size", chart))
    return found


def _market(series: Series) -> str:
    head = "<tr><th>when</th><th>nodes</th><th class=why>why</th></tr>"
    rows = "".join(
        f"<tr><td>{escape(when)}</td><td>{escape(where)}</td><td class=why>{escape(why)}</td></tr>"
        for when, where, why in series.market
    )
    return f"<table>{head}{rows}</table>"


def _epochs(result: Account) -> str:
    bars = [
        (f"epoch {epoch}", float(part.spent.usd or 0), part.spent.text(result.total.spent))
        for epoch, part in result.by_epoch.items()
        if epoch is not None
    ]
    if not bars:
        return "<p>The ledger of this run names no epochs.</p>"
    return bar_chart(bars, y_label="dollars")


def _owners(result: Account) -> str:
    whole = result.total
    rows = [(owner.value.replace("_", " "), part) for owner, part in result.by_owner.items()] + [
        ("total", whole)
    ]
    body = "".join(
        f"<tr><td>{name}</td><td>{part.seconds:,.1f}</td>"
        f"<td>{100 * part.time_us / (whole.time_us or 1):.1f}</td>"
        f"<td>{escape(part.spent.text(whole.spent))}</td>"
        f"<td>{escape(part.on_demand.text(whole.on_demand))}</td></tr>"
        for name, part in rows
    )
    head = "<tr><th>owner</th><th>node-seconds</th><th>%</th><th>cost</th><th>on demand</th></tr>"
    return f"<table>{head}{body}</table>"
