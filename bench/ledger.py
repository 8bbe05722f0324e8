"""What accounting costs a training step, and how well its figures match independent ones.

``python -m bench.ledger --json`` runs a synthetic loop of 50 ms CPU-bound steps, every other one
with the meter, while the ledger is written, and prints one line of JSON last:

- ``overhead_percent``: the median, over pairs of a metered and a plain step, of how much longer the
  metered one kept its thread busy, plus what the flushing thread used per step. CPU time, as what
  else runs on the machine can then change little; for a busy thread it is the step time.
- ``wall_overhead_percent``: the same by wall time, which noise can move.
- ``reconciliation_error_percent``: the owners' sum of two nodes, of which one is killed with
  SIGKILL at work, read back from storage, against node time by the benchmark's own clock.
- ``attribution_error_percent``: the same owner by owner on the node that was not killed; on a busy
  machine the cost of the two clocks themselves shows here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path

from ebbtide.platform.account import account
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.ledger import LedgerWriter, read_ledger
from ebbtide.platform.meter import Meter, Owner
from ebbtide.platform.prices import Market
from ebbtide.platform.records import Attempt, Finished, NodeDown, NodeUp
from ebbtide.platform.storage import LocalStorage

STEP_S = 0.05

Measure = Callable[[Owner], AbstractContextManager[None]]


def _work_loops() -> int:
    """How many turns of the work loop take one step's time on this machine."""
    loops, taken_s = 1000, 0.0
    while taken_s < STEP_S:
        loops *= 2
        start_s = time.process_time()
        _work(loops)
        taken_s = time.process_time() - start_s
    return int(loops * STEP_S / taken_s)


def _work(loops: int) -> float:
    value = 1.0
    for _ in range(loops):
        value = value * 1.0000001 + 1e-9
    return value


def _step(measure: Measure, loops: int) -> None:
    """One step as the training loop measures it: data, two waits for the network, the rest."""
    with measure(Owner.COMPUTE):
        with measure(Owner.DATA_STALL):
            _work(loops // 50)
        _work(loops * 6 // 10)
        for _ in range(2):
            with measure(Owner.NETWORK_STALL):
                _work(loops // 20)
        _work(loops * 28 // 100)


def _unmeasured(owner: Owner) -> AbstractContextManager[None]:
    return nullcontext()


class _OwnTimes:
    """The benchmark's own clock of every owner, around the meter's."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._inner_s = 0.0
        self.seconds: Counter[Owner] = Counter()

    @contextmanager
    def __call__(self, owner: Owner) -> Iterator[None]:
        outer_inner_s, self._inner_s = self._inner_s, 0.0
        start_s = time.perf_counter()
        with self._measure(owner):
            yield
        taken_s = time.perf_counter() - start_s
        self.seconds[owner] += taken_s - self._inner_s  # type: ignore[assignment]  # a float counter
        self._inner_s = outer_inner_s + taken_s


def overhead(pairs: int, folder: Path) -> dict[str, float]:
    """Cost of accounting a step."""
    loops = _work_loops()
    metered: list[tuple[float, float]] = []  # CPU and wall seconds of each step
    plain: list[tuple[float, float]] = []
    process_s, thread_s = time.process_time(), time.thread_time()
    with LedgerWriter(LocalStorage(folder)) as writer:
        meter = Meter(SystemClock(), writer.recorder("node", 0))
        for number in range(1, 2 * pairs + 1):
            with_meter = number % 4 in (0, 1)  # so that neither kind always comes first
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            if with_meter:
                meter.step = number
                _step(meter.measure, loops)
                meter.take()
            else:
                _step(_unmeasured, loops)
            taken = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            (metered if with_meter else plain).append(taken)
    others_s = time.process_time() - process_s - (time.thread_time() - thread_s)

    def median_ratio(which: int) -> float:
        return statistics.median(a[which] / b[which] for a, b in zip(metered, plain, strict=True))

    step_s = statistics.median(cpu_s for cpu_s, _ in plain)
    flush_percent = 100 * others_s / (2 * pairs) / step_s
    return {
        "step_ms": 1000 * step_s,
        "overhead_percent": 100 * (median_ratio(0) - 1) + flush_percent,
        "flush_percent": flush_percent,
        "wall_overhead_percent": 100 * (median_ratio(1) - 1),
    }


def _steps(storage: LocalStorage, node_id: str, loops: int, steps: int) -> Counter[Owner]:
    """Run metered steps on a node; the seconds of each owner by the benchmark's own clock."""
    with LedgerWriter(storage, first_interval_s=0.5) as writer:
        meter = Meter(SystemClock(), writer.recorder(node_id, 0))
        own = _OwnTimes(meter.measure)
        for number in range(1, steps + 1):
            meter.step = number
            _step(own, loops)
    return own.seconds


def _node_up(node_id: str) -> NodeUp:
    price = Decimal("3.60")
    return NodeUp(
        node_id=node_id,
        time_s=time.time(),
        instance_type=None,
        market=Market.ON_DEMAND,
        usd_per_hour=price,
        usd_per_hour_on_demand=price,
    )


def reconciliation(folder: Path) -> dict[str, float]:
    """Account two nodes, one killed at work, and compare with the benchmark's own times."""
    storage, loops = LocalStorage(folder), _work_loops()
    true_s = {}
    with LedgerWriter(storage, name="driver") as driver:
        driver.write(Attempt(index=0, start_s=time.time(), first_step=0))
        context = multiprocessing.get_context("spawn")
        victim = context.Process(target=_steps, args=(storage, "killed", loops, 10_000))
        for node_id in ("killed", "kept"):
            driver.write(_node_up(node_id))
            true_s[node_id] = -time.perf_counter()
        victim.start()
        own = _steps(storage, "kept", loops, 100)
        victim.kill()
        victim.join()
        driver.write(NodeDown(node_id="killed", time_s=time.time()))
        true_s["killed"] += time.perf_counter()
        driver.write(Finished(time_s=time.time(), status="finished"))
        true_s["kept"] += time.perf_counter()
    result = account(read_ledger(storage).records, time.time())
    found_s = result.by(lambda row: row.node.node_id)
    owners_s = result.by(lambda row: (row.node.node_id, row.owner))
    return {
        "node_seconds": result.total.seconds,
        "reconciliation_error_percent": max(
            100 * abs(found_s[node_id].seconds - s) / s for node_id, s in true_s.items()
        ),
        "attribution_error_percent": max(
            100 * abs(owners_s["kept", owner].seconds - s) / true_s["kept"]
            for owner, s in own.items()
        ),
    }


def main() -> None:
    """Run the benchmark; ``--short`` for a quick look."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    parser.add_argument("--short", action="store_true", help="fewer steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        figures = {
            **overhead(100 if arguments.short else 500, Path(folder) / "overhead"),
            **reconciliation(Path(folder) / "reconciliation"),
        }
    for name, value in figures.items():
        print(f"{name:32} {value:10.4f}")
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
