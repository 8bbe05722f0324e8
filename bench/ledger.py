"""What accounting costs a training step, and how well its figures match independent ones.

``python -m bench.ledger --json`` runs a synthetic loop of 50 ms CPU-bound steps, every third
one with the meter, while the ledger is written, and prints one line of JSON last:

- ``overhead_percent``: CPU time that the calls of the meter and the flushing thread took, by the
  threads' own clocks, over the median CPU time of a step without them. Taken where it arises, as a
  difference of whole steps cannot show a tenth of a percent on a busy machine;
- ``paired_percent`` is that difference all the same: the median, over pairs, of how much longer a
  step with meter was than one without, and ``paired_noise_percent`` the same of two without.
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


class _OwnCost:
    """Measures with the meter, and adds up the CPU time that the meter itself takes."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.cpu_s = 0.0

    @contextmanager
    def __call__(self, owner: Owner) -> Iterator[None]:
        start_s = time.thread_time()
        measure = self._meter.measure(owner)
        measure.__enter__()
        self.cpu_s += time.thread_time() - start_s
        yield
        start_s = time.thread_time()
        measure.__exit__(None, None, None)
        self.cpu_s += time.thread_time() - start_s

    def step(self, number: int, loops: int) -> None:
        """One step as the training loop makes it: the step's number, its measures, their sums."""
        start_s = time.thread_time()
        self._meter.step = number
        self.cpu_s += time.thread_time() - start_s
        _step(self, loops)
        start_s = time.thread_time()
        self._meter.take()
        self.cpu_s += time.thread_time() - start_s


def overhead(rounds: int, folder: Path) -> dict[str, float]:
    """Cost of accounting a step, over ``rounds`` of one step with the meter and two without."""
    loops = _work_loops()
    steps_s: dict[str, list[float]] = {"metered": [], "plain": [], "control": []}
    process_s, thread_s = time.process_time(), time.thread_time()
    with LedgerWriter(LocalStorage(folder)) as writer:
        cost = _OwnCost(Meter(SystemClock(), writer.recorder("node", 0)))
        for number in range(1, rounds + 1):
            kinds = list(steps_s)
            for kind in kinds if number % 2 else reversed(kinds):
                start_s = time.thread_time()
                if kind == "metered":
                    cost.step(number, loops)
                else:
                    _step(_unmeasured, loops)
                steps_s[kind].append(time.thread_time() - start_s)
    flush_s = time.process_time() - process_s - (time.thread_time() - thread_s)

    def longer_percent(kind: str) -> float:
        pairs = zip(steps_s[kind], steps_s["plain"], strict=True)
        return 100 * (statistics.median(a / b for a, b in pairs) - 1)

    step_s = statistics.median(steps_s["plain"])
    return {
        "step_ms": 1000 * step_s,
        "overhead_percent": 100 * (cost.cpu_s / rounds + flush_s / (3 * rounds)) / step_s,
        "paired_percent": longer_percent("metered"),
        "paired_noise_percent": longer_percent("control"),
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
            **overhead(60 if arguments.short else 300, Path(folder) / "overhead"),
            **reconciliation(Path(folder) / "reconciliation"),
        }
    for name, value in figures.items():
        print(f"{name:32} {value:10.4f}")
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
