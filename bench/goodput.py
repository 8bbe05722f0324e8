"""Which share of the node-seconds goes into steps that are kept, while nodes come and go.

``python -m bench.goodput --json`` trains a Llama of 5 million parameters on a local cluster of two
spot nodes, and saves as often as ``checkpoint.every: auto`` has it. Nodes are evicted with a notice
of 30 s at a fixed interval, and a new one takes the place of each ten seconds after it is gone;
then nodes are SIGKILLed every 15 s. It prints one line of JSON last:

- ``goodput_percent_120s``, ``goodput_percent_300s``: seconds of kept steps, waits inside of them
  included, over the seconds of all nodes that the run held, from its first step on, at one eviction
  per 120 s and per 300 s.
- ``kills_survived``: kills after which the run made a step further than ever before.

``--short`` has one eviction in 120 s, five kills, and null for 300 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.job import make_job
from ebbtide.platform.chaos import Chaos
from ebbtide.platform.chaos_deeds import Happening
from ebbtide.platform.chaos_plan import Event, Plan
from ebbtide.platform.ledger import read_ledger
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_nodes import LocalNodes
from ebbtide.platform.meter import Owner
from ebbtide.platform.records import NodeDown, NodeUp
from ebbtide.train.driver import Progress
from ebbtide.train.events import Step, read_events
from ebbtide.train.history import History
from ebbtide.train.job import train

NODES = 2
REPLACE_AFTER_S = 10.0
NOTICE_S = 30.0
KILL_INTERVAL_S = 15.0
IN_STEP = (Owner.COMPUTE, Owner.DATA_STALL, Owner.NETWORK_STALL)


class Over(Exception):
    """The time is over."""


def disturbed(folder: Path, name: str, plan: Plan, duration_s: float) -> tuple[str, Chaos]:
    """A run of that duration, counted from its first step, through the plan's events."""
    job = make_job(
        folder,
        name=name,
        steps=1_000_000,
        checkpoint={"keep_last": 1},
        workers={"min": 1, "max": NODES},
    )
    ends_s: list[float] = []
    carrying: list[threading.Thread] = []

    def tell(happening: Happening) -> None:
        print(f"{name}: {happening.deed} {happening.node}", file=sys.stderr, flush=True)

    with LocalCluster(NODES) as cluster:
        chaos = Chaos(LocalNodes(cluster.address), plan, tell=tell)

        def watch(progress: Progress) -> None:
            if not ends_s:
                ends_s.append(time.monotonic() + duration_s)
                carrying.append(threading.Thread(target=chaos.run, args=(is_over,)))
                carrying[0].start()
            elif is_over():
                raise Over

        def is_over() -> bool:
            return time.monotonic() > ends_s[0]

        with contextlib.suppress(Over):
            train(job, address=cluster.address, on_progress=watch)
        carrying[0].join()
    return job.run_uri, chaos


def goodput(run_uri: str) -> float:
    """Seconds in kept steps over node-seconds, between the run's first and last step."""
    history = History(read_events(run_uri))
    steps = [history.kept[number] for number in sorted(history.kept)]
    start_s, end_s = steps[0].time_s, steps[-1].time_s
    world_sizes = {each.attempt: each.world_size for each in history.attempts}
    useful_s = sum(
        world_sizes[step.attempt] * sum(step.seconds.get(owner, 0.0) for owner in IN_STEP)
        for step in steps[1:]
    )
    return useful_s / node_seconds(run_uri, start_s, end_s)


def node_seconds(run_uri: str, start_s: float, end_s: float) -> float:
    """How long the run held nodes within a span of time, summed over them."""
    up: dict[str, float] = {}
    total_s = 0.0

    def inside(from_s: float, to_s: float) -> float:
        return max(0.0, min(to_s, end_s) - max(from_s, start_s))

    for record in read_ledger(run_uri).records:
        if isinstance(record, NodeUp):
            up[record.node_id] = record.time_s
        elif isinstance(record, NodeDown) and record.node_id in up:
            total_s += inside(up.pop(record.node_id), record.time_s)
    return total_s + sum(inside(from_s, end_s) for from_s in up.values())


def survived(steps: Iterable[Step], kills_s: Iterable[float]) -> int:
    """How many of the kills were followed by a step further than any before it."""
    made = list(steps)
    count = 0
    for killed_s in kills_s:
        before = max((step.step for step in made if step.time_s <= killed_s), default=0)
        count += any(step.step > before and step.time_s > killed_s for step in made)
    return count


def evictions(interval_s: float, count: int) -> Plan:
    """One drain per interval, in its middle."""
    return Plan(
        replace_after_s=REPLACE_AFTER_S,
        events=tuple(
            Event(do="drain", at_s=interval_s * (i + 0.5), deadline_s=NOTICE_S)
            for i in range(count)
        ),
    )


def measure(
    folder: Path, is_short: bool, show: Callable[[str], None]
) -> dict[str, float | int | None]:
    """All figures."""
    found: dict[str, float | int | None] = {}
    for interval_s, count in ((120, 1 if is_short else 5), (300, 0 if is_short else 3)):
        share = None
        if count:
            run, _ = disturbed(
                folder, f"every-{interval_s}", evictions(interval_s, count), interval_s * count
            )
            share = 100 * goodput(run)
            show(f"one eviction per {interval_s} s: {share:.1f} %")
        found[f"goodput_percent_{interval_s}s"] = share
    kills = 5 if is_short else 100
    plan = Plan.every(KILL_INTERVAL_S, kills, "kill", replace_after_s=2.0)
    run, chaos = disturbed(folder, "kills", plan, KILL_INTERVAL_S * (kills + 2))
    made = [event for event in read_events(run) if isinstance(event, Step)]
    dealt = [each.time_s for each in chaos.log if each.deed == "kill"]
    found["kills_survived"] = survived(made, dealt)
    show(f"{len(dealt)} kills, {found['kills_survived']} survived")
    return found


def main() -> None:
    """Run the benchmark; ``--short`` for every day."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    parser.add_argument("--short", action="store_true", help="some four minutes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        figures = measure(Path(folder), arguments.short, lambda text: print(text, flush=True))
    if arguments.json:
        print(json.dumps({k: round(v, 2) if v is not None else None for k, v in figures.items()}))


if __name__ == "__main__":
    main()
