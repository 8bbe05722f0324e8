"""Evaluators with their real zygote and children, without Ray around them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.tune.evaluator import Evaluator, LeaseLost
from ebbtide.tune.nursery import WARM_UP, Nursery
from ebbtide.tune.running import TrialFailed
from ebbtide.tune.sharing import QUANTUM_S, Lease
from ebbtide.tune.trial import TrialRequest
from tests.tune.trials import MISDEEDS

FOLDER = Path(__file__).parent
LEASE = Lease("sweep", "job")
COLD = "os:getpid"


class Bench:
    """One evaluator and the event loop it lives on."""

    def __init__(self, runner: asyncio.Runner, warm_up: str = WARM_UP) -> None:
        self.runner = runner
        self.dead_jobs: set[str] = set()
        self.nursery = Nursery(warm_up)
        self.evaluator = Evaluator({}, self.dead_jobs.__contains__, self.nursery)
        self._numbers = iter(range(10**6))

    def do(self, work: Awaitable[Any]) -> Any:
        async def within() -> Any:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(within())

    def request(
        self, function: str, values: dict[str, Any] | None = None, marks: Path = FOLDER
    ) -> TrialRequest:
        values = values or {}
        return TrialRequest(
            trial_id=f"trial-{next(self._numbers)}",
            function=f"trials:{function}",
            base={"seed": 3, "steps": 4, "data": {"uri": str(marks)}},
            values=values,
            metric="validation_loss",
            timeout_s=1.0 if values.get("seed") == MISDEEDS.index("hangs") else 60.0,
            cwd=str(FOLDER),
        )

    def run(
        self, function: str, values: dict[str, Any] | None = None, marks: Path = FOLDER
    ) -> list[dict[str, Any]]:
        """A whole trial; its results. Raises TrialFailed."""

        async def whole() -> list[dict[str, Any]]:
            request = self.request(function, values, marks)
            results = [await self.evaluator.begin("sweep", request)]
            while not results[-1]["done"]:
                results.append(await self.evaluator.next_result("sweep", request.trial_id))
            await self.evaluator.stop("sweep", request.trial_id)
            return results

        found: list[dict[str, Any]] = self.do(whole())
        return found

    def misbehave(self, kind: str, marks: Path) -> list[dict[str, Any]]:
        return self.run("misbehave", {"seed": MISDEEDS.index(kind)}, marks)


@contextlib.contextmanager
def open_bench(warm_up: str) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        made = Bench(runner, warm_up)
        made.do(made.evaluator.acquire(LEASE))
        try:
            yield made
        finally:
            made.nursery.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench(WARM_UP) as made:
        yield made


@pytest.fixture
def cold_bench() -> Iterator[Bench]:
    """One whose zygote imports nothing, and so starts at once."""
    with open_bench(COLD) as made:
        yield made


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "did not come about in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_results_come_one_by_one(bench: Bench) -> None:
    results = bench.run("fine", {"optimizer.lr": 0.01})
    assert [result["step"] for result in results] == [1, 2, 3, 3]
    assert [result["done"] for result in results] == [False, False, False, True]
    assert results[-1]["validation_loss"] == 0.0


def test_a_trial_here_equals_one_in_a_fresh_process(bench: Bench) -> None:
    here = [result["validation_loss"] for result in bench.run("torch_fit", {"optimizer.lr": 0.1})]
    program = (
        "import trials\n"
        "losses = []\n"
        "final = trials.torch_fit({'seed': 3}, {'optimizer.lr': 0.1},"
        " lambda m: losses.append(m['validation_loss']))\n"
        "print(losses + [final['validation_loss']])"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", program],
        cwd=FOLDER,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert fresh.stdout.strip() == str(here)


LEFT = [
    "environment",
    "module",
    "builtin",
    "dtype",
    "folder",
    "threads",
    "decimals",
    "gradients",
    "signals",
    "path",
]


@pytest.mark.parametrize("kind", LEFT)
def test_a_trial_leaves_nothing_behind(bench: Bench, kind: str) -> None:
    first, second = (bench.run("leaky", {"kind": kind})[-1] for _ in range(2))
    assert first["validation_loss"] == second["validation_loss"] == 0.0
    assert all(first[name] != second[name] for name in ("python", "numpy", "torch"))


def test_a_trial_is_the_same_in_any_order(bench: Bench) -> None:
    def losses(rates: Sequence[float]) -> dict[float, list[float]]:
        found = {}
        for rate in rates:
            bench.run("leaky", {"kind": "dtype"})
            results = bench.run("torch_fit", {"optimizer.lr": rate})
            found[rate] = [result["validation_loss"] for result in results]
        return found

    rates = (0.1, 0.01, 0.001)
    assert losses(rates) == losses(rates[::-1])


def test_a_trial_that_takes_too_much_memory_fails_alone(bench: Bench) -> None:
    request = replace(bench.request("hoards"), memory_bytes=1 << 30)
    with pytest.raises(TrialFailed, match=r"out of memory \(trial_memory_gb is 1\.07\)"):
        bench.do(bench.evaluator.begin("sweep", request))
    assert bench.run("fine", {"optimizer.lr": 0.01})[-1]["validation_loss"] == 0.0


@pytest.mark.parametrize(
    ("kind", "reason", "may_retry"),
    [
        ("raises", "ValueError: the learning rate is cursed", False),
        ("is nan", "validation_loss is nan", False),
        ("is inf", "validation_loss is inf", False),
        ("always exits", "the trial's process ended with exit code 3", True),
        ("sys.exits once", "the trial called sys.exit(0)", True),
        ("is killed", "was killed by SIGKILL (out of memory?)", True),
        ("hangs", "the trial passed its time-out of 1 s", False),
    ],
)
def test_a_trial_fails_alone_and_says_why(
    bench: Bench, tmp_path: Path, kind: str, reason: str, may_retry: bool
) -> None:
    with pytest.raises(TrialFailed) as failure:
        bench.misbehave(kind, tmp_path)
    assert reason in str(failure.value)
    assert failure.value.may_retry == may_retry
    assert bench.misbehave("behaves", tmp_path)[-1]["validation_loss"] == 0.2


def test_what_a_trial_started_ends_with_it(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="exit code 4"):
        bench.misbehave("leaves a process", tmp_path)

    def left() -> bool:
        found = subprocess.run(["pgrep", "-f", "left-behind"], capture_output=True)
        return found.returncode == 0

    wait_for(lambda: not left())


def test_a_dead_zygote_is_replaced(cold_bench: Bench, tmp_path: Path) -> None:
    bench = cold_bench
    with pytest.raises(TrialFailed) as failure:
        bench.misbehave("kills the zygote", tmp_path)
    assert failure.value.may_retry
    assert bench.misbehave("behaves", tmp_path)[-1]["validation_loss"] == 0.2
    assert bench.nursery.zygotes_started == 2


def test_stop_ends_a_running_trial(bench: Bench, tmp_path: Path) -> None:
    request = bench.request("slow", marks=tmp_path)
    pid = bench.do(bench.evaluator.begin("sweep", request))["pid"]
    assert alive(pid)
    bench.do(bench.evaluator.stop("sweep", request.trial_id))
    wait_for(lambda: not alive(pid))


def test_a_paused_trial_goes_on_where_it_was(bench: Bench) -> None:
    request, other = (bench.request("fine", {"optimizer.lr": 0.01}) for _ in range(2))

    async def story() -> list[dict[str, Any]]:
        evaluator = bench.evaluator
        first = await evaluator.begin("sweep", request)
        await evaluator.pause("sweep", request.trial_id)
        between = await evaluator.begin("sweep", other)
        await evaluator.stop("sweep", other.trial_id)
        second = await evaluator.begin("sweep", request)
        third = await evaluator.next_result("sweep", request.trial_id)
        return [first, between, second, third]

    first, between, second, third = bench.do(story())
    assert [result["step"] for result in (first, between, second, third)] == [1, 1, 2, 3]
    assert first["pid"] == second["pid"] == third["pid"] != between["pid"]
    bench.do(bench.evaluator.pause("sweep", request.trial_id))
    assert alive(first["pid"])
    bench.do(bench.evaluator.forget("sweep", request.trial_id))
    wait_for(lambda: not alive(first["pid"]))


def test_calls_that_arrive_too_early_wait_for_those_before_them(bench: Bench) -> None:
    request, other = (bench.request("fine", {"optimizer.lr": 0.01}) for _ in range(2))

    async def story() -> list[dict[str, Any]]:
        evaluator, loop = bench.evaluator, asyncio.get_running_loop()
        first = await evaluator.begin("sweep", request)
        saved, paused = loop.create_future(), loop.create_future()
        early = asyncio.create_task(evaluator.begin("sweep", other, None, [paused]))
        pausing = asyncio.create_task(evaluator.pause("sweep", request.trial_id, [saved]))
        await asyncio.sleep(0)
        assert not early.done() and evaluator._stage.running(request.trial_id)
        saved.set_exception(LeaseLost("a call before that failed was there all the same"))
        await pausing
        paused.set_result(None)
        between = await early
        await evaluator.stop("sweep", other.trial_id)
        return [first, between, await evaluator.begin("sweep", request)]

    first, between, second = bench.do(story())
    assert [result["step"] for result in (first, between, second)] == [1, 1, 2]
    assert first["pid"] == second["pid"] != between["pid"]


def test_what_a_sweep_has_heard_is_skipped_and_all_is_remembered(bench: Bench) -> None:
    whole = replace(bench.request("fine", {"optimizer.lr": 0.01}), sweep="key", number=7)
    rest = replace(whole, trial_id="rest", skip=2)

    async def results(request: TrialRequest, count: int) -> list[dict[str, Any]]:
        found = [await bench.evaluator.begin("sweep", request)]
        while len(found) < count:
            found.append(await bench.evaluator.next_result("sweep", request.trial_id))
        return found

    heard, told = bench.do(results(whole, 4)), bench.do(results(rest, 2))
    kept = ("step", "validation_loss", "training_iteration", "done")
    assert [[each[key] for key in kept] for each in heard[2:]] == [
        [each[key] for key in kept] for each in told
    ]
    first, second = bench.do(bench.evaluator.recall("key"))
    assert (first.number, first.skipped, first.results) == (7, 0, heard)
    assert (second.number, second.skipped, second.results) == (7, 2, told)
    assert bench.do(bench.evaluator.recall("another")) == []


def test_a_second_sweep_waits_for_the_first_and_a_dead_driver_holds_nothing(
    cold_bench: Bench, tmp_path: Path
) -> None:
    bench = cold_bench
    other, third = Lease("other", "other-job"), Lease("third", "third-job")

    async def story() -> int:
        waiting = asyncio.create_task(bench.evaluator.acquire(other))
        gone = asyncio.create_task(bench.evaluator.acquire(Lease("gone", "job")))
        await asyncio.sleep(0)
        assert not waiting.done() and not gone.done()
        await bench.evaluator.release("gone")  # it ends while it still waits
        await bench.evaluator.release("sweep")
        with pytest.raises(LeaseLost):
            await gone
        await waiting
        with pytest.raises(LeaseLost):
            await bench.evaluator.begin("sweep", bench.request("fine"))
        request = bench.request("slow", marks=tmp_path)
        pid: int = (await bench.evaluator.begin("other", request))["pid"]
        bench.dead_jobs.add("other-job")
        await bench.evaluator.acquire(third)
        return pid

    pid = bench.do(story())
    wait_for(lambda: not alive(pid))


def test_a_higher_priority_waits_for_one_trial_and_an_equal_for_its_turn(
    cold_bench: Bench,
) -> None:
    bench, evaluator = cold_bench, cold_bench.evaluator
    equal, higher = Lease("equal", "job-2"), Lease("higher", "job-3", priority=1)

    async def trial(sweep_id: str) -> bool:
        request = bench.request("fine", {"optimizer.lr": 0.01})
        await evaluator.begin(sweep_id, request)
        yielded: bool = await evaluator.stop(sweep_id, request.trial_id)
        return yielded

    async def story() -> None:
        waiting = {
            lease.sweep_id: asyncio.create_task(evaluator.acquire(lease))
            for lease in (equal, higher)
        }
        await asyncio.sleep(0)
        assert await trial("sweep")
        await waiting["higher"]
        again = asyncio.create_task(evaluator.acquire(LEASE))
        await asyncio.sleep(0)
        assert not await trial("higher") and not again.done()
        await evaluator.release("higher")
        await waiting["equal"]
        assert not await trial("equal")  # it has just begun
        await asyncio.sleep(QUANTUM_S)
        assert await trial("equal")
        await again

    bench.do(story())


def test_an_evaluator_that_nobody_wants_ends() -> None:
    ended: list[float] = []

    async def story() -> None:
        nursery = Nursery(COLD)
        evaluator = Evaluator(
            {},
            lambda job: False,
            nursery,
            idle_timeout_s=0.1,
            retire=lambda: ended.append(time.monotonic()),
        )
        evaluator.warm_up()
        await evaluator.acquire(LEASE)
        await asyncio.sleep(0.5)
        assert not ended
        await evaluator.release("sweep")
        while not ended:
            await asyncio.sleep(0.02)
        nursery.close()

    with asyncio.Runner() as runner:
        runner.run(asyncio.wait_for(story(), 60))


def test_children_end_when_the_evaluator_does(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from ebbtide.tune.nursery import Nursery\n"
        "from ebbtide.tune.trial import TrialRequest\n"
        "async def main():\n"
        "    nursery = Nursery('os:getpid')\n"
        "    child = await nursery.child()\n"
        "    base = {'data': {'uri': sys.argv[1]}}\n"
        "    request = TrialRequest('t', 'trials:slow', base, {}, 'x', 9)\n"
        "    child.writer.write(request.line())\n"
        "    print(nursery.zygote_pid, child.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert all(alive(pid) for pid in pids)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids))
