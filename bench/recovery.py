"""From a kill or a notice to the next step, against Ray Train as it comes.

``python -m bench.recovery --json`` trains a Llama of 5 million parameters with up to three workers
on a local cluster of three nodes, SIGKILLs a node of a rank (raylet and workers) ten times, and
announces the end of one five times, always while another rank is there; a new node takes each
one's place, but is not started before the run has made its next step: it would take the cores of
this machine from the restart. Ray Train's own elastic trainer loses one node in the same way, on a
cluster with Ray's own settings; no node takes its place. It prints one line of JSON last:

- ``kill_to_step_s_median``, ``kill_to_step_s_p95``: from the SIGKILL to the first step that was
  finished after it.
- ``notice_to_step_s_median``: from the notice to the first step without the announced node. The run
  makes steps for five seconds of it, while other notices may come; ``notice_pause_s_median`` is the
  time without steps.
- ``steps_lost_kill_max``, ``steps_lost_notice_max``: steps that had to be made again.
- ``stock_ray_kill_to_step_s``; ``ratio_vs_stock``: how many times longer that is than our median.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench.job import make_job
from ebbtide.platform.chaos import Chaos
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_nodes import LocalNodes
from ebbtide.platform.ray_seam.environment import RAYS_FAILURE_DETECTION
from ebbtide.train.driver import Progress
from ebbtide.train.events import Event, Step, read_events
from ebbtide.train.history import History
from ebbtide.train.job import train

NODES = 3
SAVE_EVERY = 5
STEPS_BETWEEN = 6


class Enough(Exception):
    """Every blow has been dealt."""


@dataclass(frozen=True)
class Blow:
    """A kill or a notice, in the run's attempt ``attempt``."""

    kind: str
    time_s: float
    attempt: int


class Blows:
    """Deals a blow to a node of a rank whenever the run has made some steps since the last one."""

    def __init__(self, cluster: LocalCluster, kinds: list[str]) -> None:
        self._cluster, self._kinds = cluster, kinds
        self._nodes = LocalNodes(cluster.address)
        self._chaos = Chaos(self._nodes)
        self._first_step = (-1, 0)
        self._adding: threading.Thread | None = None
        self._victim: str | None = None
        self.dealt: list[Blow] = []

    def __call__(self, progress: Progress) -> None:
        if progress.attempt != self._first_step[0]:
            self._first_step = (progress.attempt, progress.step)
            if self._victim is not None:
                self._adding = threading.Thread(target=self._replace, args=(self._victim,))
                self._adding.start()
                self._victim = None
        ready = progress.step >= self._first_step[1] + STEPS_BETWEEN
        if self._adding is not None and self._adding.is_alive():
            return
        if self.dealt and self.dealt[-1].attempt == progress.attempt:
            return  # it has not been felt yet
        if not ready or len(self._nodes.nodes()) < NODES:
            return
        if len(self.dealt) == len(self._kinds):
            raise Enough
        kind = self._kinds[len(self.dealt)]
        busy = [n for n in self._nodes.nodes() if self._nodes.busy_workers(n, "TrainWorker")]
        if len(busy) < 2:
            return  # a restart has begun meanwhile, or no peer holds what a kill takes away
        victim = busy[len(self.dealt) % len(busy)].name
        if kind == "kill":
            happening = self._chaos.kill(victim)
        else:
            happening = self._chaos.drain(victim, 60.0, take_away=False)
        self.dealt.append(Blow(kind, happening.time_s, progress.attempt))
        print(f"step {progress.step}: {kind} {victim}", file=sys.stderr, flush=True)
        self._victim = victim

    def _replace(self, victim: str) -> None:
        while any(node.name == victim for node in self._nodes.nodes()):
            time.sleep(0.5)  # a drained node ends when the run has left it
        self._cluster.add_node()

    def finish(self) -> None:
        if self._adding is not None:
            self._adding.join()
        self._chaos.finish()


def ours(folder: Path, kinds: list[str]) -> dict[str, float]:
    """The figures of ``ebbtide train``."""
    job = make_job(
        folder,
        name="recovery",
        steps=100_000,
        checkpoint={"every": SAVE_EVERY},
        workers={"min": 1, "max": NODES},
    )
    with LocalCluster(NODES) as cluster:
        blows = Blows(cluster, kinds)
        try:
            with contextlib.suppress(Enough):
                train(job, address=cluster.address, on_progress=blows)
        finally:
            blows.finish()
    events = read_events(job.run_uri)
    history = History(events)
    lost = {each.attempt: each.steps_lost for each in history.attempts}
    took: dict[str, list[float]] = {"kill": [], "notice": [], "pause": []}
    for blow in blows.dealt:
        next_s = min(step.time_s for step in steps(events) if step.attempt > blow.attempt)
        last_s = max(step.time_s for step in steps(events) if step.attempt == blow.attempt)
        took[blow.kind].append(next_s - blow.time_s)
        if blow.kind == "notice":
            took["pause"].append(next_s - last_s)
    print({kind: [round(s, 2) for s in seconds] for kind, seconds in took.items()}, flush=True)
    return {
        "kill_to_step_s_median": statistics.median(took["kill"]),
        "kill_to_step_s_p95": sorted(took["kill"])[math.ceil(0.95 * len(took["kill"])) - 1],
        "notice_to_step_s_median": statistics.median(took["notice"]),
        "notice_pause_s_median": statistics.median(took["pause"]),
        "steps_lost_kill_max": max(lost[b.attempt] for b in blows.dealt if b.kind == "kill"),
        "steps_lost_notice_max": max(lost[b.attempt] for b in blows.dealt if b.kind == "notice"),
    }


def steps(events: list[Event]) -> list[Step]:
    """The steps among the events."""
    return [event for event in events if isinstance(event, Step)]


def stock(folder: Path) -> float:
    """Seconds from a SIGKILLed node to the next step with Ray Train's own trainer."""
    job, made = folder / "stock.json", folder / "stock-steps"
    job.write_text(make_job(folder).model_dump_json())
    made.touch()

    def after(time_s: float, count: int) -> list[list[float]]:
        deadline_s = time.monotonic() + 300
        while True:
            found = [json.loads(line) for line in made.read_text().splitlines()]
            later = [each for each in found if each[0] > time_s]
            if len(later) >= count:
                return later
            if time.monotonic() > deadline_s:
                raise TimeoutError("Ray Train has made no step for five minutes")
            time.sleep(0.1)

    with LocalCluster(NODES, environment=RAYS_FAILURE_DETECTION) as cluster:
        driver = subprocess.Popen(
            [sys.executable, "-m", "bench.stock", job, made, cluster.address, str(SAVE_EVERY)],
            env={**os.environ, **cluster.environment},
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            after(0.0, 2 * SAVE_EVERY + 2)
            nodes = LocalNodes(cluster.address)
            victim = next(n for n in nodes.nodes() if nodes.busy_workers(n, "TrainWorker"))
            pids = {each[2] for each in after(0.0, 1)}
            killed_s = time.time()
            nodes.kill(victim)
            while True:
                fresh = [each for each in after(killed_s, 1) if each[2] not in pids]
                if fresh:
                    return fresh[0][0] - killed_s
                time.sleep(0.1)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


def main() -> None:
    """Run the benchmark; ``--short`` for a quick look."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    parser.add_argument("--short", action="store_true", help="three kills and two notices")
    arguments = parser.parse_args()
    kinds = (["kill"] * 2 + ["notice"]) * 5
    if arguments.short:
        kinds = ["kill", "notice", "kill", "notice", "kill"]
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        figures = ours(Path(folder), kinds)
        figures["stock_ray_kill_to_step_s"] = stock(Path(folder))
    ratio = figures["stock_ray_kill_to_step_s"] / figures["kill_to_step_s_median"]
    figures["ratio_vs_stock"] = ratio
    for name, value in figures.items():
        print(f"{name:28} {value:8.2f}")
    if arguments.json:
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
