"""An evaluator's trials one after the other, and the sweeps that share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.tune.evaluator import Evaluator, LeaseLost
from ebbtide.tune.nursery import Nursery
from ebbtide.tune.running import Memory, TrialEnded
from ebbtide.tune.sharing import QUANTUM_S, Lease
from ebbtide.tune.trial import TrialRequest
from tests.tune.evaluators import COLD, LEASE, Bench, alive, open_bench, wait_for


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench(COLD) as made:
        yield made


@pytest.fixture
def own_bench() -> Iterator[Bench]:
    """One whose lease a test may give away."""
    with open_bench(COLD) as made:
        yield made


def test_results_come_one_by_one(bench: Bench) -> None:
    results = bench.run("fine", {"optimizer.lr": 0.01})
    assert [result["step"] for result in results] == [1, 2, 3, 3]
    assert [result["done"] for result in results] == [False, False, False, True]
    assert results[-1]["validation_loss"] == 0.0


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
    own_bench: Bench, tmp_path: Path
) -> None:
    bench = own_bench
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


@pytest.mark.parametrize("pause_s", [1.2, 60.0])
@pytest.mark.parametrize("finds_out", ["the evaluator", "the next driver"])
def test_what_a_trial_returns_as_its_driver_dies_is_remembered_and_its_end_is_no_failure(
    own_bench: Bench, monkeypatch: pytest.MonkeyPatch, pause_s: float, finds_out: str
) -> None:
    limit_s = 30.0 if pause_s < 30 else 0.1
    monkeypatch.setattr("ebbtide.tune.evaluator._LAST_RESULT_S", limit_s)
    bench, evaluator = own_bench, own_bench.evaluator
    request = replace(bench.request("pauses", {"pause_s": pause_s}), sweep="key")

    async def story() -> tuple[list[Memory], int, Any]:
        call = asyncio.create_task(evaluator.begin("sweep", request))
        while (pid := (await evaluator.status())["trial_pid"]) is None:
            await asyncio.sleep(0)
        if finds_out == "the evaluator":
            bench.dead_jobs.add("job")
            await evaluator.acquire(Lease("other", "other-job"))
        memories = await evaluator.recall("key")
        outcome: Any = (await asyncio.gather(call, return_exceptions=True))[0]
        assert memories == await evaluator.recall("key")  # nothing comes after
        return memories, pid, outcome

    (memory,), pid, outcome = bench.do(story())
    assert memory.failure is None
    assert [result["finished"] for result in memory.results] == ([True] if pause_s < 30 else [])
    assert isinstance(outcome, TrialEnded) == (pause_s > 30)
    wait_for(lambda: not alive(pid))


def test_a_higher_priority_waits_for_one_trial_and_an_equal_for_its_turn(
    own_bench: Bench,
) -> None:
    bench, evaluator = own_bench, own_bench.evaluator
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
