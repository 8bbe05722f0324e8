"""The picture of a run: its loss, what happened to its nodes, and how many workers it had.

Draws on a canvas of its own (Agg; no display, no global state of matplotlib).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which stay apart for colour-blind eyes.
_INK, _GREY = "#222222", "#8a8a8a"
_LOSS, _VALIDATION = "#0072b2", "#000000"
_KINDS = {
    "notice": ("#c98500", "evicted (notice)"),
    "kill": ("#d55e00", "killed"),
    "growth": ("#009e73", "node added"),
}
_SMOOTH_FROM = 60
"""With as many losses as this a running mean is drawn over them."""

_CHARACTER_WIDTH = 0.0078
"""About the width of a character of a mark's label, as a part of the picture's."""


@dataclass(frozen=True)
class Mark:
    """Something that happened to the run after ``step`` finished steps. ``text`` replaces the
    kind's own words."""

    step: int
    kind: Literal["notice", "kill", "growth"]
    text: str | None = None


def loss_curve_png(
    path: Path,
    steps: Sequence[int],
    losses: Sequence[float],
    *,
    marks: Sequence[Mark] = (),
    validation: Sequence[tuple[int, float]] = (),
    world_sizes: Sequence[tuple[int, int]] = (),
    reference: tuple[str, float] | None = None,
    title: str = "",
) -> None:
    """Draw a run's loss curve to a PNG file.

    ``losses`` (nats per token) belong to ``steps``; ``validation`` is (step, loss); ``world_sizes``
    is (steps finished before, workers from then on) by attempt; ``reference`` names a level, such
    as the corpus' unigram entropy.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (5, 1), "hspace": 0.04}
    )
    last = max([1, *steps, *(step for step, _ in validation), *(mark.step for mark in marks)])
    top.set_xlim(0, last * 1.01)
    _draw_losses(top, steps, losses, validation, reference)
    levels = _draw_marks(top, bottom, marks, last)
    _draw_world_sizes(bottom, world_sizes, last)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, labelsize=9)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
        top.set_title(" ", fontsize=4 + 12 * levels)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture.getvalue())


def _draw_losses(
    axes: Axes,
    steps: Sequence[int],
    losses: Sequence[float],
    validation: Sequence[tuple[int, float]],
    reference: tuple[str, float] | None,
) -> None:
    smooth = len(losses) >= _SMOOTH_FROM
    axes.plot(
        steps,
        losses,
        color=_LOSS,
        lw=0.8 if smooth else 1.6,
        alpha=0.35 if smooth else 1,
        label=None if smooth else "training loss",
    )
    if smooth:
        axes.plot(steps, running_mean(losses), color=_LOSS, lw=1.8, label="training loss (mean)")
    if validation:
        at, values = zip(*validation, strict=True)
        axes.plot(at, values, "o", ms=5, color=_VALIDATION, label="validation loss", zorder=4)
        axes.annotate(
            f"{values[-1]:.3f}",
            (at[-1], values[-1]),
            xytext=(-6, 7),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=_VALIDATION,
        )
    if reference is not None:
        name, level = reference
        axes.axhline(level, color=_GREY, lw=1, ls=(0, (5, 4)), label=f"{name} ({level:.3f})")
    axes.set_ylabel("loss, nats per token", color=_INK)
    axes.grid(axis="y", color="#e6e6e6", lw=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", fontsize=9, framealpha=0.9, edgecolor="none")


def running_mean(values: Sequence[float], parts: int = 30) -> list[float]:
    """The mean of each value and those around it, over a window of 1/``parts`` of the whole."""
    half = max(1, len(values) // (2 * parts))
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)  # symmetric, so ends are not bent
        window = values[index - reach : index + reach + 1]
        means.append(sum(window) / len(window))
    return means


def label_levels(spans: Sequence[tuple[float, float]]) -> list[int]:
    """For labels from left to right, the lowest row each fits in without touching another."""
    levels: list[int] = []
    for start, end in spans:
        taken = {
            level
            for level, (other_start, other_end) in zip(levels, spans, strict=False)
            if start <= other_end and end >= other_start
        }
        levels.append(next(level for level in count() if level not in taken))
    return levels


def _draw_marks(top: Axes, bottom: Axes, marks: Sequence[Mark], last: int) -> int:
    """The marks with their labels above the picture; gives how many rows of labels there are."""
    marks = sorted(marks, key=lambda mark: mark.step)
    labels = [f"{mark.text or _KINDS[mark.kind][1]}, step {mark.step}" for mark in marks]
    places = []  # in parts of the picture's width; leftwards from a mark near the right end
    for mark, label in zip(marks, labels, strict=True):
        at, width = mark.step / last, _CHARACTER_WIDTH * len(label)
        places.append((at - width, at) if at + width > 1 else (at, at + width))
    levels = label_levels(places)
    for mark, label, place, level in zip(marks, labels, places, levels, strict=True):
        colour = _KINDS[mark.kind][0]
        for axes in (top, bottom):
            axes.axvline(mark.step, color=colour, lw=1.2, zorder=1)
        leftwards = place[0] < mark.step / last
        top.annotate(
            label,
            (mark.step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(1 if leftwards else -1, 4 + 12 * level),
            textcoords="offset points",
            ha="right" if leftwards else "left",
            fontsize=8.5,
            color=colour,
        )
    return max(levels, default=-1) + 1


def _draw_world_sizes(axes: Axes, world_sizes: Sequence[tuple[int, int]], last: int) -> None:
    kept: list[tuple[int, int]] = []
    for step, size in world_sizes:
        while kept and kept[-1][0] >= step:  # its steps are done again with another size
            kept.pop()
        kept.append((step, size))
    if kept:
        starts, sizes = zip(*kept, strict=True)
        axes.stairs(sizes, [*starts, max(last, starts[-1])], color=_LOSS, fill=True, alpha=0.2)
        axes.stairs(sizes, [*starts, max(last, starts[-1])], color=_LOSS, lw=1.4, baseline=None)
        axes.set_ylim(0, max(sizes) + 0.6)
        axes.set_yticks(range(0, max(sizes) + 1, max(1, max(sizes) // 4)))
    axes.set_ylabel("workers", color=_INK)
    axes.set_xlabel("step", color=_INK)
