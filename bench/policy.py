"""What policies pay over the clairvoyant optimum, on traces of spot markets.

``python -m bench.policy --traces DIR --seed N --json`` prints one line of JSON last. A 48-hour job,
work/deadline 0.9, 0.8 and 0.7, on-demand three times the price of spot (prices of traces are not
used), restart delay 0.217 h. Every figure is the mean, over windows, of cost / optimum of the same
window; windows start in the second half of a trace and end in it, the first half is what a policy
may learn beforehand (only ``tide`` learns). Traces whose second half is shorter than the deadline
are named and left out.

- ``POLICY.one_zone.S``: every trace by itself.
- ``POLICY.four_zones.S``: four zones of a set: of one region and type where a set has four such,
  else of one type, else any four of it; up to six combinations a set.
- ``POLICY.gang.0_8``: four nodes at once or none, in one zone where a trace has that many nodes;
  if no trace has, spread over the zones of a set (``gang_spread`` is then true).
- ``deadline_misses``: of all policies, over all windows.
- ``tide_against_best_baseline_percent``: the worst of all sets and kinds: how much more ``tide``
  pays than the best fixed policy of that set.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ebbtide.platform.errors import DataError
from ebbtide.platform.market.study import POLICIES, Job, draw_windows
from ebbtide.platform.market.traces import Trace, align, read_sets

WORK_H, RESTART_H, ON_DEMAND_USD, SPOT_USD, GANG = 48.0, 0.217, 3.0, 1.0, 4
JUDGED = [name for name in POLICIES if name not in ("spot_only", "price_pause")]
"""Not ``spot_only``, which knows no deadline, and ``price_pause``, as prices stand still here."""
MOST_COMBINATIONS = 6
TRACES = Path("../shared/data/spot_traces")
"""Where traces are looked for: beside the repository, as they are not part of it."""


@dataclass(frozen=True)
class Case:
    """Zones to judge the policies on."""

    kind: str
    set_name: str
    zones: tuple[Trace, ...]
    nodes: int
    load: float  # work / deadline

    @property
    def key(self) -> str:
        return f"{self.kind}.{str(self.load).replace('.', '_')}"

    @property
    def name(self) -> str:
        return f"{self.set_name} {self.key} {' '.join(zone.zone for zone in self.zones)}"


def job(load: float, nodes: int = 1) -> Job:
    """The job of the measure."""
    hour_s = 3600.0
    return Job(
        WORK_H * hour_s, WORK_H / load * hour_s, RESTART_H * hour_s, ON_DEMAND_USD, SPOT_USD, nodes
    )


def cases(sets: Mapping[str, tuple[Trace, ...]], draw: np.random.Generator) -> Iterator[Case]:
    """One zone, four zones and gangs of every set."""
    tick_s = job(0.9).tick_s
    able = any(trace.nodes.max() >= GANG for traces in sets.values() for trace in traces)
    for name, found in sets.items():
        traces = [_unpriced(trace.resample(tick_s)) for trace in found]
        for trace in traces:
            for load in (0.9, 0.8, 0.7):
                yield Case("one_zone", name, (trace,), 1, load)
        together: dict[float, list[Trace]] = defaultdict(list)
        for trace in traces:
            together[trace.tick_s].append(trace)
        for alike in together.values():
            for four in _fours(alike, draw):
                for load in (0.9, 0.8):
                    yield Case("four_zones", name, align(four, tick_s), 1, load)
            if not able and len(alike) >= GANG:
                nodes = np.sum([trace.nodes for trace in align(alike, tick_s)], axis=0)
                yield Case("gang", name, (Trace("spread", alike[0].tick_s, nodes),), GANG, 0.8)
        for trace in traces:
            if trace.nodes.max() >= GANG:
                yield Case("gang", name, (trace,), GANG, 0.8)


def _unpriced(trace: Trace) -> Trace:
    return Trace(trace.zone, trace.tick_s, trace.nodes)


def _fours(traces: Sequence[Trace], draw: np.random.Generator) -> list[tuple[Trace, ...]]:
    """Up to ``MOST_COMBINATIONS`` choices of four zones that a job would really choose from."""
    alike: dict[tuple[str, str], list[Trace]] = defaultdict(list)
    for trace in traces:
        zone, _, kind = trace.zone.partition("_")
        alike[zone.rstrip("abcdefghij"), kind].append(trace)
        alike["any region", kind].append(trace)
        alike["any region", "any type"].append(trace)
    chosen = [group for group in alike.values() if len(group) >= 4]
    chosen.sort(key=len)
    if not chosen:
        return []
    fours = list(itertools.combinations(chosen[0], 4))
    order = draw.permutation(len(fours))[:MOST_COMBINATIONS]
    return [fours[index] for index in order]


def judge(sets: Mapping[str, tuple[Trace, ...]], seed: int, windows: int) -> dict[str, object]:
    """All figures of a collection of traces."""
    draw = np.random.default_rng(seed)
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)  # policy, kind, set
    misses = dict.fromkeys(JUDGED, 0)
    seconds = dict.fromkeys([*JUDGED, "optimum"], 0.0)
    short, spread, judged = [], False, 0
    for case in cases(sets, draw):
        study = draw_windows(job(case.load, case.nodes), case.zones, windows, draw)
        if not study.windows:
            short.append(case.name)
            continue
        spread |= case.zones[0].zone == "spread"
        judged += len(study.windows)
        start_s = time.process_time()
        least = study.optimum()
        seconds["optimum"] += time.process_time() - start_s
        for name in JUDGED:
            start_s = time.process_time()
            result = study.run(POLICIES[name], least)
            seconds[name] += time.process_time() - start_s
            ratios[name, case.key, case.set_name] += result.over_optimum
            misses[name] += result.misses
    figures: dict[str, object] = {}
    for name in JUDGED:
        for key in dict.fromkeys(key for _, key, _ in ratios):
            values = [
                v for (n, k, _), part in ratios.items() if (n, k) == (name, key) for v in part
            ]
            figures[f"{name}.{key}"] = round(float(np.mean(values)), 4)
    worse = against_baselines(ratios)
    return {
        **figures,
        "deadline_misses": sum(misses.values()),
        "tide_against_best_baseline_percent": round(max(worse.values(), default=0.0), 2),
        "tide_against_best_baseline": worse,
        "gang_spread": spread,
        "windows": judged,
        "too_short": short,
        "seconds_per_1000_windows": {
            name: round(1000 * s / max(judged, 1), 1) for name, s in seconds.items()
        },
    }


def against_baselines(ratios: Mapping[tuple[str, str, str], list[float]]) -> dict[str, float]:
    """By set and kind, how many percent more than the best fixed policy ``tide`` pays."""
    worse = {}
    for _, key, set_name in ratios:
        mean = {name: float(np.mean(ratios[name, key, set_name])) for name in JUDGED}
        best = min(value for name, value in mean.items() if name != "tide")
        worse[f"{set_name} {key}"] = round(100 * (mean["tide"] / best - 1), 2)
    return worse


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--traces", type=Path, default=TRACES, help=f"folder of traces (default: {TRACES})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of windows and combinations")
    parser.add_argument("--windows", type=int, default=24, help="windows a case")
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    arguments = parser.parse_args()
    try:
        sets = read_sets([arguments.traces])
    except DataError as error:
        raise SystemExit(f"--traces: {error}") from error
    figures = judge(sets, arguments.seed, arguments.windows)
    for name, value in figures.items():
        if isinstance(value, float | int):
            print(f"{name:40} {value}")
    for name in figures["too_short"]:  # type: ignore[attr-defined]  # a list of text
        print(f"left out, too short: {name}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
