"""The evaluator: stays, holds a warm zygote, and runs one trial at a time in a child of it.

It is the body of a named, detached Ray actor, and imports neither Ray nor torch itself. Promises:
one sweep at a time holds it, and a sweep whose driver has died holds it no longer; a trial that
raises, exits, hangs or is killed fails alone, with its reason; a metric that is not finite is a
failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from ebbtide.tune.nursery import Nursery
from ebbtide.tune.running import Memory, RunningTrial
from ebbtide.tune.sharing import Lease, Turns
from ebbtide.tune.stage import Stage
from ebbtide.tune.trial import TrialRequest

_log = logging.getLogger(__name__)
_OWNER_CHECK_S = 1.0
_LAST_RESULT_S = 1.0
"""A trial whose driver has died may still tell the result that it was asked for: so a short one
need not run again."""


class LeaseLost(Exception):
    """The caller does not hold this evaluator (any more)."""


async def _over(calls: Sequence[Awaitable[Any]]) -> None:
    """Wait until calls are over, however they end."""
    await asyncio.gather(*map(asyncio.ensure_future, calls), return_exceptions=True)


class Evaluator:
    """One seat of the pool. All methods run on one event loop; trials run in child processes.

    Calls of one driver may arrive in any order. One that is to find what others have done names
    those as ``after``, and begins when they are over.

    ``job_is_dead`` tells whether a driver's job has ended; it may block for milliseconds.
    ``retire`` ends the evaluator after ``idle_timeout_s`` without a sweep; without it, it stays.
    """

    def __init__(
        self,
        facts: dict[str, Any],
        job_is_dead: Callable[[str], bool],
        nursery: Nursery,
        *,
        idle_timeout_s: float = math.inf,
        retire: Callable[[], None] | None = None,
    ) -> None:
        self._facts = facts
        self._job_is_dead = job_is_dead
        self._nursery = nursery
        self._idle_timeout_s, self._retire = idle_timeout_s, retire
        self._lease: Lease | None = None
        self._leased_at_s = self._freed_at_s = time.monotonic()
        self._turns = Turns()
        self._waiting: dict[str, Lease] = {}  # in the order in which they came
        self._freed = asyncio.Event()
        self._released: set[str] = set()
        self._stage = Stage(nursery)
        self._background: set[asyncio.Task[Any]] = set()

    def warm_up(self) -> None:
        """Begin to warm up, ahead of the first lease. Called on the event loop."""
        self._spawn(self._nursery.warm())
        if self._retire is not None:
            self._spawn(self._watch_idleness(self._retire))

    async def acquire(self, lease: Lease) -> dict[str, Any]:
        """Wait until it is the sweep's turn and the evaluator is warm; then hold it.

        Raises LeaseLost if the sweep has been released meanwhile.
        """
        if self._lease != lease:
            self._waiting[lease.sweep_id] = lease
            self._turns.came(lease, [*filter(None, [self._lease]), *self._waiting.values()])
        try:
            while lease.sweep_id not in self._released and not self._is_turn(lease):
                self._freed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _OWNER_CHECK_S)
        finally:
            self._waiting.pop(lease.sweep_id, None)
        if lease.sweep_id in self._released:
            raise LeaseLost(f"sweep {lease.sweep_id} has ended")
        if self._lease is None:
            self._lease, self._leased_at_s = lease, time.monotonic()
            self._spawn(self._watch_owner(lease))
        ready = await self._nursery.warm()
        return {**self._facts, "warm_s": ready.get("warm_s", 0.0)}

    async def release(self, sweep_id: str) -> None:
        """End the sweep's trial, if one runs, and let others have the evaluator, for good."""
        self._released.add(sweep_id)
        self._turns.went(sweep_id)
        if self._lease is not None and self._lease.sweep_id == sweep_id:
            self._stage.clear()
            self._let_go()
        self._freed.set()

    def _let_go(self) -> None:
        self._lease, self._freed_at_s = None, time.monotonic()
        self._freed.set()

    def _is_turn(self, lease: Lease) -> bool:
        if self._lease is not None:
            return self._lease == lease
        return self._turns.next(self._waiting.values()) == lease

    async def begin(
        self,
        sweep_id: str,
        request: TrialRequest,
        state: str | bytes | None = None,
        after: Sequence[Awaitable[Any]] = (),
    ) -> dict[str, Any]:
        """Start a trial, or let one go on that is paused here; its next result.

        ``state`` is the file, or its content, that the trial is to go on from. Where that is lost,
        it is made again by the request's lineage. Raises TrialFailed, LeaseLost.
        """
        await _over(after)
        self._check(sweep_id)
        trial = await self._stage.begin(request, state)
        try:
            self._check(sweep_id)
        except LeaseLost:
            self._stage.end(trial)
            raise
        self._spawn(self._nursery.warm())  # fork the next child while this one runs
        return await self.next_result(sweep_id, request.trial_id)

    async def next_result(self, sweep_id: str, trial_id: str) -> dict[str, Any]:
        """The trial's next result; ``done`` marks the last. Raises TrialFailed, LeaseLost."""
        trial = self._running(sweep_id, trial_id)
        result = await self._stage.next_result(trial)
        if result["done"]:
            self._spawn(self._learn(trial.imported))
        return result

    async def save(self, sweep_id: str, trial_id: str, name: str) -> str:
        """Keep the trial's state at its last report; the file with it, for others on this node.

        Raises TrialFailed if it has none to give, LeaseLost.
        """
        return await self._stage.save(self._running(sweep_id, trial_id), name)

    async def state(self, sweep_id: str, name: str, path: str) -> bytes | None:
        """The content of the file with a saved state, for other nodes; None if it is lost."""
        return self._stage.state(name)

    async def drop(self, sweep_id: str, names: Collection[str]) -> None:
        """Let go of states that nothing goes on from any more. Raises LeaseLost."""
        self._check(sweep_id)
        self._stage.drop(names)

    async def pause(
        self, sweep_id: str, trial_id: str, after: Sequence[Awaitable[Any]] = ()
    ) -> None:
        """Keep the trial's process, at its last report, until it begins again or is forgotten."""
        await _over(after)
        self._check(sweep_id)
        trial = self._stage.running(trial_id)
        if trial is not None:
            self._stage.pause(trial)

    async def forget(
        self, sweep_id: str, trial_id: str, after: Sequence[Awaitable[Any]] = ()
    ) -> None:
        """End a paused trial."""
        await _over(after)
        self._check(sweep_id)
        self._stage.forget(trial_id)

    async def stop(
        self, sweep_id: str, trial_id: str, after: Sequence[Awaitable[Any]] = ()
    ) -> bool:
        """End a trial that runs, finished or not; nothing of it is left.

        True: the evaluator is another sweep's now, and this one has to :meth:`acquire` it again.
        """
        await _over(after)
        trial = self._stage.running(trial_id)
        if trial is not None:
            self._check(sweep_id)
            self._stage.end(trial)
        return self._yield(sweep_id)

    def _yield(self, sweep_id: str) -> bool:
        """Let another sweep have its turn, between two trials; a paused one holds on."""
        lease = self._lease
        if lease is None or lease.sweep_id != sweep_id or self._stage.is_taken:
            return False
        held_s = time.monotonic() - self._leased_at_s
        if not self._turns.yields(lease, self._waiting.values(), held_s):
            return False
        self._turns.had(lease, held_s)
        self._let_go()
        return True

    async def recall(self, sweep: str) -> list[Memory]:
        """What came of a sweep's newest trials here, whoever holds the evaluator now.

        The driver that began them is dead: one that still runs tells its next result and ends.
        """
        await self._stage.settle(_LAST_RESULT_S, sweep)
        return self._stage.memories(sweep)

    async def status(self) -> dict[str, Any]:
        """Facts for people: what it runs, for whom, how often it had to start again."""
        trial = self._stage.trial
        return {
            **self._facts,
            "pid": os.getpid(),
            "zygote_pid": self._nursery.zygote_pid,
            "sweep_id": None if self._lease is None else self._lease.sweep_id,
            "waiting": [lease.sweep_id for lease in self._waiting.values()],
            "trial_id": None if trial is None else trial.request.trial_id,
            "trial_pid": None if trial is None else trial.child.pid,
            "trials_run": self._stage.trials_run,
            "zygotes_started": self._nursery.zygotes_started,
        }

    def _running(self, sweep_id: str, trial_id: str) -> RunningTrial:
        self._check(sweep_id)
        trial = self._stage.running(trial_id)
        if trial is None:
            raise LeaseLost(f"trial {trial_id} does not run here")
        return trial

    def _check(self, sweep_id: str) -> None:
        if self._lease is None or self._lease.sweep_id != sweep_id:
            raise LeaseLost(f"sweep {sweep_id} does not hold this evaluator")

    async def _watch_owner(self, lease: Lease) -> None:
        """Free the evaluator when the driver that holds it has died."""
        loop = asyncio.get_running_loop()
        while self._lease is lease:
            await asyncio.sleep(_OWNER_CHECK_S)
            is_dead = await loop.run_in_executor(None, self._job_is_dead, lease.job_id)
            if is_dead and self._lease is lease:
                _log.warning("the driver of sweep %s has died; freeing", lease.sweep_id)
                await self._stage.settle(_LAST_RESULT_S)
                await self.release(lease.sweep_id)

    async def _watch_idleness(self, retire: Callable[[], None]) -> None:
        """End the evaluator when no sweep has wanted it for long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_OWNER_CHECK_S, self._idle_timeout_s))
            idle_s = time.monotonic() - self._freed_at_s
            if self._lease is None and not self._waiting and idle_s >= self._idle_timeout_s:
                _log.info("no sweep for %.0f s; ending", idle_s)
                await loop.run_in_executor(None, retire)

    async def _learn(self, modules: list[str]) -> None:
        await self._nursery.teach(modules)
        await self._nursery.warm()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("evaluator: %s", error)
