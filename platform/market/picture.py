"""A window as a picture: what the zones offered, and what each policy ran, hour by hour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none is opened
from matplotlib.figure import Figure  # noqa: E402  (after the backend is chosen)

from ebbtide.platform.errors import DataError
from ebbtide.platform.market.policy import Placement, Terms
from ebbtide.platform.market.simulator import Outcome, Window
from ebbtide.platform.prices import Market

COLOURS = {Market.ON_PREM: "#2e9e5b", Market.SPOT: "#e8b930", Market.ON_DEMAND: "#d1495b"}
_OFFERED = "#9fb8d0"


def draw(path: Path, terms: Terms, window: Window, outcomes: Mapping[str, Outcome]) -> None:
    """Write the picture to ``path`` (.svg, .png or .pdf). Outcomes must hold their placements.

    Raises DataError where the file cannot be written or its ending is not a picture's.
    """
    rows = len(window.zones) + len(outcomes)
    figure = Figure(figsize=(9, 0.9 + 0.34 * rows), layout="constrained")
    axes = figure.add_subplot()
    tick_h = window.tick_s / 3600
    labels: list[str] = []
    for trace in window.zones:
        spans = _spans([nodes >= terms.nodes for nodes in trace.nodes.tolist()], tick_h)
        axes.broken_barh(spans, (len(labels) - 0.3, 0.6), color=_OFFERED)
        labels.append(f"{trace.zone} offers")
    for name, outcome in outcomes.items():
        for market, colour in COLOURS.items():
            spans = _spans([_in(placed, market) for placed in outcome.placements], tick_h)
            axes.broken_barh(spans, (len(labels) - 0.3, 0.6), color=colour)
        labels.append(f"{name}  ${outcome.usd:,.0f}")
    axes.set_yticks(range(rows), labels)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, terms.deadline_s / 3600)
    axes.set_xlabel("hours (the axis ends at the deadline)")
    for market, colour in COLOURS.items():
        if any(_in(p, market) for outcome in outcomes.values() for p in outcome.placements):
            axes.barh(0, 0, color=colour, label=market.value.replace("_", "-"))
    axes.barh(0, 0, color=_OFFERED, label="spot on offer")
    figure.legend(loc="outside upper right", ncols=4, frameon=False, fontsize="small")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    dated = {"Date": None} if path.suffix == ".svg" else None  # the same bytes every time
    try:
        figure.savefig(path, metadata=dated)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: the picture cannot be written: {error}") from error


def _in(placed: Placement, market: Market) -> bool:
    return placed.nodes > 0 and placed.market is market


def _spans(on: list[bool], tick_h: float) -> list[tuple[float, float]]:
    """Stretches of true as (start, length) in hours."""
    spans: list[tuple[float, float]] = []
    start = None
    for tick, value in enumerate([*on, False]):
        if value and start is None:
            start = tick
        elif not value and start is not None:
            spans.append((start * tick_h, (tick - start) * tick_h))
            start = None
    return spans
