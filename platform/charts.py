"""Charts as SVG text for a page that loads nothing: lines, steps, stacked areas, bars.

Pure; numbers go in, text comes out, and whatever a user named is escaped. Colours are Okabe and
Ito's, which stay apart for colour-blind eyes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 22, 30
_LABELLED = 8
_INK, _GRID = "#444", "#e4e4e4"


@dataclass(frozen=True)
class Event:
    """A vertical mark at ``x`` with a short label."""

    x: float
    label: str
    colour: str


@dataclass(frozen=True)
class Scale:
    """From data to the picture."""

    first: float
    last: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        width = self.last - self.first
        part = (value - self.first) / width if width else 0.5
        return round(self.start + part * (self.end - self.start), 1)


def ticks(first: float, last: float, about: int = 5) -> list[float]:
    """Round numbers from ``first`` to ``last``."""
    if not last > first:
        return [first]
    raw = (last - first) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    start = math.ceil(first / step - 1e-9)
    return [round(n * step, 12) for n in range(start, math.floor(last / step + 1e-9) + 1)]


def line_chart(
    points: Sequence[tuple[float, float]],
    *,
    x_label: str,
    y_label: str,
    dots: Sequence[tuple[float, float]] = (),
    events: Sequence[Event] = (),
) -> str:
    """A line (and dots of a second series) with events marked."""
    ys = [y for _, y in [*points, *dots]]
    xs = [*(x for x, _ in [*points, *dots]), *(event.x for event in events)]
    frame = _Frame(_span(xs), _padded(ys))
    path = " ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in points)
    drawn = f'<polyline fill="none" stroke="#0072b2" stroke-width="1.5" points="{path}"/>'
    drawn += "".join(
        f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="3.5" fill="#222">'
        f"<title>validation {y:.4f} at {x:g}</title></circle>"
        for x, y in dots
    )
    return frame.svg(drawn + _marks(events, frame), x_label, y_label)


def step_chart(
    levels: Sequence[tuple[float, float]], end: float, *, x_label: str, y_label: str
) -> str:
    """A level from each ``x`` on, to ``end``."""
    most = max([1, *(y for _, y in levels)])
    frame = _Frame(_span([*(x for x, _ in levels), end]), (0, most), min(5, int(most)))
    path = []
    for index, (x, y) in enumerate(levels):
        until = levels[index + 1][0] if index + 1 < len(levels) else end
        path += [f"{frame.x(x)},{frame.y(y)}", f"{frame.x(until)},{frame.y(y)}"]
    drawn = f'<polyline fill="none" stroke="#0072b2" stroke-width="2" points="{" ".join(path)}"/>'
    return frame.svg(drawn, x_label, y_label)


def stacked_chart(
    edges: Sequence[float],
    series: Sequence[tuple[str, str, Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
) -> str:
    """Stacked columns: each of ``series`` (name, colour, one height for each bin of ``edges``)."""
    heights = [sum(values) for values in zip(*(s[2] for s in series), strict=True)]
    frame = _Frame((edges[0], edges[-1]), (0, max([1e-9, *heights])))
    drawn, floors = [], [0.0] * (len(edges) - 1)
    for name, colour, values in series:
        for index, value in enumerate(values):
            if value > 0:
                top, bottom = frame.y(floors[index] + value), frame.y(floors[index])
                left, right = frame.x(edges[index]), frame.x(edges[index + 1])
                drawn.append(
                    f'<rect x="{left}" y="{top}" width="{max(0.4, right - left):.1f}" '
                    f'height="{bottom - top:.1f}" fill="{colour}">'
                    f"<title>{escape(name)}: {value:,.1f}</title></rect>"
                )
                floors[index] += value
    return frame.svg("".join(drawn), x_label, y_label)


def bar_chart(bars: Sequence[tuple[str, float, str]], *, y_label: str) -> str:
    """One bar for each (label, height, text on it); of many, only some are labelled."""
    every = -(-len(bars) // _LABELLED)
    frame = _Frame((0, max(1, len(bars))), (0, max([1e-12, *(height for _, height, _ in bars)])))
    drawn = []
    for index, (label, height, text) in enumerate(bars):
        left, right = frame.x(index + 0.15), frame.x(index + 0.85)
        top, middle = frame.y(height), (left + right) / 2
        drawn.append(
            f'<rect x="{left}" y="{top}" width="{right - left:.1f}" '
            f'height="{frame.y(0) - top:.1f}" fill="#0072b2">'
            f"<title>{escape(label)}: {escape(text)}</title></rect>"
        )
        if index % every:
            continue
        drawn.append(
            f'<text x="{middle:.1f}" y="{top - 4:.1f}" text-anchor="middle">{escape(text)}</text>'
            f'<text x="{middle:.1f}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    return frame.svg("".join(drawn), "", y_label, x_ticks=False)


class _Frame:
    """The axes of a picture."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float], y_ticks: int = 5) -> None:
        self.xs, self.ys, self.y_ticks = xs, ys, y_ticks
        self.x = Scale(*xs, _LEFT, WIDTH - _RIGHT)
        self.y = Scale(*ys, HEIGHT - _BOTTOM, _TOP)

    def svg(self, drawn: str, x_label: str, y_label: str, x_ticks: bool = True) -> str:
        grid = "".join(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{self.y(v)}" y2="{self.y(v)}" '
            f'stroke="{_GRID}"/><text x="{_LEFT - 6}" y="{self.y(v) + 4}" text-anchor="end">'
            f"{v:,.10g}</text>"
            for v in ticks(*self.ys, about=self.y_ticks)
        )
        if x_ticks:
            grid += "".join(
                f'<text x="{self.x(v)}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">'
                f"{v:,.10g}</text>"
                for v in ticks(*self.xs, about=8)
            )
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">'
            f"{grid}{drawn}"
            f'<text x="{_LEFT}" y="12" fill="{_INK}">{escape(y_label)}</text>'
            f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 2}" text-anchor="end" fill="{_INK}">'
            f"{escape(x_label)}</text></svg>"
        )


def _marks(events: Sequence[Event], frame: _Frame) -> str:
    return "".join(
        f'<line x1="{frame.x(e.x)}" x2="{frame.x(e.x)}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" '
        f'stroke="{e.colour}" stroke-dasharray="4 3"/>'
        f'<text x="{frame.x(e.x) + (-3 if at_end else 3)}" y="{_TOP + 10 + 12 * (index % 6)}" '
        f'text-anchor="{"end" if at_end else "start"}" style="fill:{e.colour}">'
        f"{escape(e.label)}</text>"
        for index, e in enumerate(events)
        for at_end in (frame.x(e.x) > 0.8 * WIDTH,)
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = _span(values)
    pad = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return low - pad, high + pad
