"""The evaluator: stays, holds a warm zygote, and runs one trial at a time in a child of it.

It is the body of a named, detached Ray actor, and imports neither Ray nor torch itself. Promises:
one sweep at a time holds it, and a sweep whose driver has died holds it no longer; a trial that
raises, exits, hangs or is killed fails alone, with its reason; a metric that is not finite is a
failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ebbtide.tune.nursery import Child, Nursery
from ebbtide.tune.trial import Metrics, TrialRequest

_log = logging.getLogger(__name__)
_OWNER_CHECK_S = 1.0
_LAST_WORDS_S = 1.0

BOOKKEEPING = frozenset({"done", "finished", "pid", "training_iteration", "time_total_s"})
"""Keys of a result that the evaluator adds to what the trial reports."""


@dataclass(frozen=True)
class Lease:
    """A sweep's hold on an evaluator. It ends with ``job_id``, the job of its driver in Ray."""

    sweep_id: str
    job_id: str


class TrialFailed(Exception):
    """A trial ended without a usable result.

    ``may_retry``: it was killed rather than wrong. ``evicted``: by an announced eviction.
    """

    def __init__(
        self, reason: str, may_retry: bool = False, details: str = "", evicted: bool = False
    ) -> None:
        super().__init__(reason, may_retry, details, evicted)  # all, so that it can be pickled
        self.reason, self.may_retry = reason, may_retry
        self.details, self.evicted = details, evicted

    def __str__(self) -> str:
        return self.reason


class LeaseLost(Exception):
    """The caller does not hold this evaluator (any more)."""


def check_metrics(metrics: Metrics, metric: str) -> Metrics:
    """The metrics as they came. Raises TrialFailed if ``metric`` is not there or not finite."""
    if metric not in metrics:
        known = ", ".join(sorted(metrics)) or "nothing"
        raise TrialFailed(f"the trial reports no {metric}; it reports {known}")
    value = metrics[metric]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TrialFailed(f"{metric} is {value!r}, not a number")
    if not math.isfinite(value):
        raise TrialFailed(f"{metric} is {value}")
    return metrics


def death_reason(exit_code: int | None) -> str:
    """What to tell of a trial whose process ended without a word."""
    if exit_code is None:
        return "the trial's process was killed together with its zygote"
    if exit_code >= 0:
        return f"the trial's process ended with exit code {exit_code}"
    hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
    with contextlib.suppress(ValueError):
        return f"the trial's process was killed by {signal.Signals(-exit_code).name}{hint}"
    return f"the trial's process was killed by signal {-exit_code}"


class _RunningTrial:
    """One trial in its child: results one by one, until the last."""

    def __init__(self, request: TrialRequest, child: Child) -> None:
        self.request = request
        self.child = child
        self._deadline_s = time.monotonic() + request.timeout_s
        self._started_s = time.monotonic()
        self._num_results = 0
        self._last: Metrics = {}
        self.imported: list[str] = []

    def send(self, line: bytes) -> None:
        self.child.writer.write(line)

    async def next_result(self) -> dict[str, Any]:
        """Let the trial go on to its next report. Raises TrialFailed."""
        if self._num_results:
            self.send(b"go\n")
        message = await self._message()
        if message["event"] == "failed":
            raise TrialFailed(message["reason"], message["may_retry"], message["details"])
        self._last = {**self._last, **message["metrics"]}
        check_metrics(self._last, self.request.metric)
        self._num_results += 1
        finished = message["event"] == "done"
        self.imported = message.get("imported", [])
        return {
            **self._last,
            "done": finished,
            "finished": finished,  # a scheduler sets "done" as well
            "pid": self.child.pid,
            "training_iteration": self._num_results,
            "time_total_s": time.monotonic() - self._started_s,
        }

    async def _message(self) -> dict[str, Any]:
        """The child's next message. It has ended if its stream has, or if its process has: what it
        started may still hold the stream."""
        read = asyncio.ensure_future(self.child.reader.readline())
        ended = asyncio.shield(self.child.exit_code)
        left_s = max(0.0, self._deadline_s - time.monotonic())
        either: set[asyncio.Future[Any]] = {read, ended}
        await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            await asyncio.wait({read}, timeout=_LAST_WORDS_S)
        elif not read.done():
            read.cancel()
            limit_s = f"{self.request.timeout_s:g} s"
            raise TrialFailed(f"the trial passed its time-out of {limit_s}")
        line = b""
        with contextlib.suppress(ConnectionError, ValueError):  # ValueError: no line, however long
            line = read.result() if read.done() else b""
        if line.endswith(b"\n"):
            message: dict[str, Any] = json.loads(line)
            return message
        read.cancel()
        self.child.kill()
        raise TrialFailed(death_reason(await self.child.exit_code), may_retry=True)


class Evaluator:
    """One seat of the pool. All methods run on one event loop; trials run in child processes.

    ``job_is_dead`` tells whether a driver's job has ended; it may block for milliseconds.
    """

    def __init__(
        self, facts: dict[str, Any], job_is_dead: Callable[[str], bool], nursery: Nursery
    ) -> None:
        self._facts = facts
        self._job_is_dead = job_is_dead
        self._nursery = nursery
        self._lease: Lease | None = None
        self._freed = asyncio.Event()
        self._released: set[str] = set()
        self._trial: _RunningTrial | None = None
        self._trials_run = 0
        self._background: set[asyncio.Task[Any]] = set()

    def warm_up(self) -> None:
        """Begin to warm up, ahead of the first lease. Called on the event loop."""
        self._spawn(self._nursery.warm())

    async def acquire(self, lease: Lease) -> dict[str, Any]:
        """Wait until no other living sweep holds this evaluator and it is warm; then hold it.

        Raises LeaseLost if the sweep has been released meanwhile.
        """
        while lease.sweep_id not in self._released and self._lease not in (None, lease):
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), _OWNER_CHECK_S)
        if lease.sweep_id in self._released:
            raise LeaseLost(f"sweep {lease.sweep_id} has ended")
        if self._lease is None:
            self._lease = lease
            self._spawn(self._watch_owner(lease))
        await self._nursery.warm()
        return self._facts

    async def release(self, sweep_id: str) -> None:
        """End the sweep's trial, if one runs, and let others have the evaluator, for good."""
        self._released.add(sweep_id)
        if self._lease is not None and self._lease.sweep_id == sweep_id:
            self._end_trial(self._trial)
            self._lease = None
            self._freed.set()

    async def start(self, sweep_id: str, request: TrialRequest) -> None:
        """Start a trial. Raises LeaseLost."""
        self._check(sweep_id)
        self._end_trial(self._trial)
        trial = _RunningTrial(request, await self._nursery.child())
        trial.send(request.line())
        self._trial = trial
        self._trials_run += 1
        self._spawn(self._nursery.warm())  # fork the next child while this one runs

    async def next_result(self, sweep_id: str, trial_id: str) -> dict[str, Any]:
        """The trial's next result; ``done`` marks the last. Raises TrialFailed, LeaseLost."""
        self._check(sweep_id)
        trial = self._trial
        if trial is None or trial.request.trial_id != trial_id:
            raise LeaseLost(f"trial {trial_id} does not run here")
        try:
            result = await trial.next_result()
        except TrialFailed:
            self._end_trial(trial)
            raise
        if result["done"]:
            self._end_trial(trial)
            self._spawn(self._learn(trial.imported))
        return result

    async def stop(self, sweep_id: str, trial_id: str) -> None:
        """End a trial, finished or not; nothing of it is left."""
        if self._trial is not None and self._trial.request.trial_id == trial_id:
            self._check(sweep_id)
            self._end_trial(self._trial)

    async def status(self) -> dict[str, Any]:
        """Facts for people: what it runs, for whom, how often it had to start again."""
        return {
            **self._facts,
            "pid": os.getpid(),
            "zygote_pid": self._nursery.zygote_pid,
            "sweep_id": None if self._lease is None else self._lease.sweep_id,
            "trial_id": None if self._trial is None else self._trial.request.trial_id,
            "trial_pid": None if self._trial is None else self._trial.child.pid,
            "trials_run": self._trials_run,
            "zygotes_started": self._nursery.zygotes_started,
        }

    def _check(self, sweep_id: str) -> None:
        if self._lease is None or self._lease.sweep_id != sweep_id:
            raise LeaseLost(f"sweep {sweep_id} does not hold this evaluator")

    def _end_trial(self, trial: _RunningTrial | None) -> None:
        if trial is not None:
            trial.child.kill()
            if self._trial is trial:
                self._trial = None

    async def _watch_owner(self, lease: Lease) -> None:
        """Free the evaluator when the driver that holds it has died."""
        loop = asyncio.get_running_loop()
        while self._lease is lease:
            await asyncio.sleep(_OWNER_CHECK_S)
            if await loop.run_in_executor(None, self._job_is_dead, lease.job_id):
                _log.warning("the driver of sweep %s has died; freeing", lease.sweep_id)
                await self.release(lease.sweep_id)

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
