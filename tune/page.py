"""The page of a sweep: parallel coordinates, curves and a table. One file, nothing is loaded.

Every trial is one line; pointing at it anywhere shows it everywhere. Pure.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.platform.account import usd_text
from ebbtide.tune.results import SweepResult, Trial

_WIDTH, _HEIGHT, _TOP, _SIDE = 960.0, 300.0, 44.0, 70.0
_UNSET = -0.06  # where the line of a trial without the key passes its axis
_LOG_FROM = 50.0  # an axis of positive numbers that spans more than this is logarithmic

_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;color:#222;max-width:1000px;margin:24px auto;padding:0 16px}
h1{font-size:20px}h2{font-size:15px;margin:28px 0 4px}svg{width:100%;height:auto}
svg text{font-size:11px;fill:#444;paint-order:stroke;stroke:#fff;stroke-width:3px}
path.t{fill:none;stroke-width:1.4;opacity:.6}
path.t.failed{stroke:#bbb;stroke-dasharray:4 3}path.t.best{stroke-width:3;opacity:1}
.on path.t{opacity:.08}.on path.t.hit{opacity:1;stroke-width:3}
line.axis{stroke:#999}table{border-collapse:collapse;width:100%;font-size:12px}
td,th{padding:2px 8px;text-align:right;border-bottom:1px solid #eee}
tr.best{font-weight:bold}tr.hit{background:#ffeeba}td.s,th.s{text-align:left}
"""
_SCRIPT = """
const show=n=>{document.body.classList.toggle('on',!!n);
document.querySelectorAll('.hit').forEach(e=>e.classList.remove('hit'));
if(n)document.querySelectorAll('[data-n="'+n+'"]').forEach(e=>e.classList.add('hit'))};
document.querySelectorAll('[data-n]').forEach(e=>{
e.addEventListener('mouseenter',()=>show(e.dataset.n));
e.addEventListener('mouseleave',()=>show(''))});
"""


@dataclass(frozen=True)
class Axis:
    """Where a value lies between 0 and 1, and what is written at which places."""

    low: float
    high: float
    is_log: bool
    names: tuple[str, ...] = ()  # of values that are no numbers, in order

    @classmethod
    def of(cls, values: Sequence[Any]) -> Axis:
        known = [value for value in values if value is not None]
        numbers = [float(value) for value in known if _is_number(value)]
        if len(numbers) < len(known) or not numbers:
            names = tuple(dict.fromkeys(str(value) for value in known))
            return cls(0.0, max(1.0, len(names) - 1.0), False, names)
        low, high = min(numbers), max(numbers)
        is_log = low > 0 and high / low > _LOG_FROM
        return cls(low, high, is_log)

    def at(self, value: Any) -> float:
        if self.names:
            return self.names.index(str(value)) / self.high
        low, high, number = self.low, self.high, float(value)
        if self.is_log:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return (number - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        if self.names:
            return [(index / self.high, name) for index, name in enumerate(self.names)]
        if self.high == self.low:
            return [(0.5, _text(self.low))]
        places = [0.0, 0.25, 0.5, 0.75, 1.0]
        return [(place, _text(self._value(place))) for place in places]

    def _value(self, place: float) -> float:
        if self.is_log:
            return math.exp(math.log(self.low) * (1 - place) + math.log(self.high) * place)
        return self.low * (1 - place) + self.high * place


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)


def _colour(result: SweepResult, trial: Trial) -> str:
    """Blue for the best to yellow for the worst, by rank."""
    ranked = sorted(
        (each for each in result.trials if each.usable),
        key=lambda each: (each.metric or 0.0) * (1 if result.mode == "min" else -1),
    )
    if trial not in ranked:
        return "#bbb"
    share = ranked.index(trial) / max(1, len(ranked) - 1)
    low, high = (0, 90, 178), (240, 200, 66)
    return "#" + "".join(
        f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high, strict=True)
    )


def _line(result: SweepResult, trial: Trial, points: Sequence[tuple[float, float]]) -> str:
    kind = "best" if trial is result.best else "failed" if trial.status == "failed" else ""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    title = html.escape(f"trial {trial.number}: {result.metric} {_text(trial.metric)}")
    return (
        f'<path class="t {kind}" data-n="{trial.number}" stroke="{_colour(result, trial)}" '
        f'd="{path}"><title>{title}</title></path>'
    )


def _svg(parts: Sequence[str]) -> str:
    box = f"0 0 {_WIDTH:g} {_HEIGHT + _TOP + 20:g}"
    return f'<svg viewBox="{box}" role="img">{"".join(parts)}</svg>'


def _axis(x: float, axis: Axis, name: str) -> str:
    marks = "".join(
        f'<text x="{x - 6:.1f}" y="{_y(at) + 4:.1f}" text-anchor="end">{html.escape(text)}</text>'
        for at, text in axis.ticks()
    )
    title = f'<text x="{x:.1f}" y="{_TOP - 20:g}" text-anchor="middle">{html.escape(name)}</text>'
    bar = f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_y(1):.1f}" y2="{_y(0):.1f}"/>'
    return bar + marks + title


def _y(place: float) -> float:
    return _TOP + _HEIGHT * (1 - place)


def coordinates(result: SweepResult) -> str:
    """Parallel coordinates: an axis for each key, the metric last; below an axis is "not set"."""
    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.values))
    columns = [(key, [trial.values.get(key) for trial in result.trials]) for key in keys]
    columns.append((result.metric, [t.metric if t.usable else None for t in result.trials]))
    gap = (_WIDTH - 2 * _SIDE) / max(1, len(columns) - 1)
    axes = [Axis.of(values) for _, values in columns]
    lines = []
    for index, trial in enumerate(result.trials):
        points = [
            (_SIDE + gap * place, _y(_UNSET if values[index] is None else axis.at(values[index])))
            for place, (axis, (_, values)) in enumerate(zip(axes, columns, strict=True))
            if values[index] is not None or place < len(keys)
        ]
        lines.append(_line(result, trial, points))
    drawn = [
        _axis(_SIDE + gap * place, axis, name)
        for place, (axis, (name, _)) in enumerate(zip(axes, columns, strict=True))
    ]
    return _svg([*lines, *drawn])


def curves(result: SweepResult) -> str:
    """The metric of every trial by its step."""
    tracks = []
    for trial in result.trials:
        points = [
            (float(report.get("step", at)), float(report[result.metric]))
            for at, report in enumerate(trial.reports, 1)
            if _is_number(report.get(result.metric)) and _is_number(report.get("step", at))
        ]
        if points:
            tracks.append((trial, points))
    if not tracks:
        return "<p>No trial has reported.</p>"
    across = Axis.of([0.0, *(x for _, points in tracks for x, _ in points)])
    across = Axis(across.low, across.high, False)
    up = Axis.of([y for _, points in tracks for _, y in points])
    width = _WIDTH - 2 * _SIDE
    lines = [
        _line(result, trial, [(_SIDE + width * across.at(x), _y(up.at(y))) for x, y in points])
        for trial, points in tracks
    ]
    below = f'y="{_y(0) + 16:.1f}" text-anchor="middle"'
    steps = "".join(
        f'<text x="{_SIDE + width * at:.1f}" {below}>{text}</text>' for at, text in across.ticks()
    )
    return _svg([*lines, _axis(_SIDE, up, result.metric), steps])


def _table(result: SweepResult) -> str:
    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.values))
    names = ["trial", *keys, result.metric, "seconds"]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names) + '<th class="s">status</th>'
    rows = []
    for trial in result.trials:
        status = f"failed: {trial.reason}" if trial.status == "failed" else trial.status
        numbers = [trial.number, *(trial.values.get(key) for key in keys), trial.metric]
        cells = "".join(f"<td>{html.escape(_text(value))}</td>" for value in numbers)
        kind = ' class="best"' if trial is result.best else ""
        rows.append(
            f'<tr{kind} data-n="{trial.number}">{cells}<td>{trial.seconds:.2f}</td>'
            f'<td class="s">{html.escape(status)}</td></tr>'
        )
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def page(result: SweepResult) -> str:
    """The whole page."""
    name, best = html.escape(result.name), result.best
    found = "no trial succeeded" if best is None else f"best {_text(best.metric)}"
    cost = "unknown" if result.usd is None else usd_text(result.usd)
    facts = [
        f"{len(result.trials)} trials, {len(result.failed)} failed",
        f"{html.escape(result.metric)} ({result.mode}): {found}",
        f"{result.seconds:.1f} s, cost {cost}{' (partial)' if result.partial else ''}",
        html.escape(result.limit or result.status),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style><body><h1>{name}</h1><p>{' · '.join(facts)}</p>"
        f"<h2>Values</h2>{coordinates(result)}<h2>Curves</h2>{curves(result)}"
        f"<h2>Trials</h2>{_table(result)}<script>{_SCRIPT}</script></body></html>\n"
    )
