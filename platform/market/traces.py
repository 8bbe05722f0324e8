"""Traces of a spot market: how many nodes one could have had, zone by zone, tick by tick.

A trace is a JSON file named after its zone,
``{"metadata": {"gap_seconds": S}, "data": [nodes, ...], "prices": [usd_per_hour, ...]}``; prices
are optional. The files of one folder are the zones of one set: probed over the same days.
Promises: a file that is not such a trace is refused with its name and the reason; nothing is
filled in.

Traces come in ticks of 30 s to 10 min. Simulation wants one tick for all zones, short against the
restart delay: ``resample`` repeats long ticks and joins short ones. A joined tick has the least
nodes of its parts: a node that is lost for a moment is lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.platform.errors import DataError

LEAST_GAP_S, MOST_GAP_S = 1.0, 86_400.0
MOST_NODES, MOST_USD = 1_000_000, 1e6
"""What is beyond these in a trace is a mistake."""

Nodes = NDArray[np.int64]
Usd = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trace:
    """One zone: nodes that could be had in each tick and, where known, their spot price."""

    zone: str
    tick_s: float
    nodes: Nodes
    usd_per_hour: Usd | None = None

    @property
    def duration_s(self) -> float:
        """From the first tick to the end of the last."""
        return len(self.nodes) * self.tick_s

    def between(self, start: int, stop: int) -> Trace:
        """The ticks from ``start`` (0-based) up to ``stop``."""
        prices = None if self.usd_per_hour is None else self.usd_per_hour[start:stop]
        return Trace(self.zone, self.tick_s, self.nodes[start:stop], prices)

    def resample(self, tick_s: float) -> Trace:
        """The same trace in ticks as near to ``tick_s`` as whole parts or multiples come."""
        if self.tick_s >= tick_s:
            parts = max(1, round(self.tick_s / tick_s))
            prices = None if self.usd_per_hour is None else np.repeat(self.usd_per_hour, parts)
            return Trace(self.zone, self.tick_s / parts, np.repeat(self.nodes, parts), prices)
        joined = max(1, round(tick_s / self.tick_s))
        length = len(self.nodes) // joined
        rows = self.nodes[: length * joined].reshape(length, joined)
        if self.usd_per_hour is not None:
            prices = self.usd_per_hour[: length * joined].reshape(length, joined).mean(axis=1)
        else:
            prices = None
        return Trace(self.zone, self.tick_s * joined, rows.min(axis=1), prices)


def read_trace(path: Path) -> Trace:
    """Read one trace file. Raises DataError that names the file and what is wrong with it."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
        raise DataError(f'{path}: not a trace; it must hold "metadata" and "data"')
    gap = document["metadata"].get("gap_seconds")
    if not _is_number(gap) or not LEAST_GAP_S <= gap <= MOST_GAP_S:
        raise DataError(
            f"{path}: metadata.gap_seconds must be from {LEAST_GAP_S:g} to {MOST_GAP_S:g} "
            f"(found {gap!r})"
        )
    nodes, prices = document.get("data"), document.get("prices")
    if not isinstance(nodes, list) or not nodes:
        raise DataError(f"{path}: data must be a list of nodes per tick, and not empty")
    for tick, value in enumerate(nodes):
        if not _is_number(value) or not 0 <= value <= MOST_NODES or value % 1:
            raise DataError(f"{path}: data[{tick}] must be a count of nodes (found {value!r})")
    if prices is not None:
        if not isinstance(prices, list) or len(prices) != len(nodes):
            raise DataError(f"{path}: prices must be a list as long as data ({len(nodes)})")
        for tick, value in enumerate(prices):
            if not _is_number(value) or not 0 < value <= MOST_USD:
                raise DataError(
                    f"{path}: prices[{tick}] must be above 0 and at most {MOST_USD:g} "
                    f"(found {value!r})"
                )
    return Trace(
        path.stem,
        float(gap),
        np.array(nodes, dtype=np.int64),
        None if prices is None else np.array(prices, dtype=np.float64),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def read_sets(paths: Iterable[Path]) -> Mapping[str, tuple[Trace, ...]]:
    """The traces of files and folders (searched through), by set: a folder's files, by zone.

    A set is named by the parts of its folder that tell it from the others. Raises DataError if a
    path is not there, holds no trace, or a file is no trace.
    """
    files: set[Path] = set()
    for path in paths:
        if path.is_file():
            files.add(path)
        elif not path.is_dir():
            raise DataError(f"{path}: no such file or folder; name a trace or a folder of traces")
        elif found := set(path.rglob("*.json")):
            files |= found
        else:
            raise DataError(f"{path}: holds no trace (*.json)")
    folders: dict[Path, list[Trace]] = {}
    for file in sorted(files):
        folders.setdefault(file.parent, []).append(read_trace(file))
    names = _short_names(list(folders))
    return {names[folder]: tuple(traces) for folder, traces in folders.items()}


def _short_names(folders: list[Path]) -> dict[Path, str]:
    """Each folder's path without the parts that all have in common, but never nothing."""
    parts = [folder.resolve().parts for folder in folders]
    shared = min(len(part) for part in parts) - 1
    while shared and len({part[:shared] for part in parts}) > 1:
        shared -= 1
    return {folder: "/".join(part[shared:]) for folder, part in zip(folders, parts, strict=True)}


def align(traces: Iterable[Trace], tick_s: float) -> tuple[Trace, ...]:
    """Traces of one set in ticks of one length (the nearest to ``tick_s``) and number.

    Raises DataError where the zones' ticks cannot be brought to one length.
    """
    sampled = [trace.resample(tick_s) for trace in traces]
    lengths_s = {trace.tick_s for trace in sampled}
    if len(lengths_s) > 1:
        names = ", ".join(f"{trace.zone} {trace.tick_s:g} s" for trace in sampled)
        raise DataError(f"zones of one set have ticks that do not fit together: {names}")
    ticks = min(len(trace.nodes) for trace in sampled)
    return tuple(trace.between(0, ticks) for trace in sampled)
