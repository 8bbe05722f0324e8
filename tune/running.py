"""One trial in its child process, as its evaluator sees it: results one by one, until the last.

Promises: a trial that raises, exits, hangs or is killed fails with its reason; a metric that is not
finite is a failure; what came of it is remembered for the driver that continues a killed one's
sweep; one that its own sweep has ended has not failed, and what it had said by then counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ebbtide.tune.nursery import Child
from ebbtide.tune.trial import GO, Metrics, TrialRequest

_LAST_WORDS_S = 1.0

BOOKKEEPING = frozenset({"done", "finished", "pid", "training_iteration", "time_total_s"})
"""Keys of a result that the evaluator adds to what the trial reports."""


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


class TrialEnded(TrialFailed):
    """The trial was ended from without: by its sweep, or because its driver is gone."""


@dataclass
class Memory:
    """What came of a trial, kept for the driver that continues the sweep of one that was killed."""

    sweep: str
    number: int
    values: dict[str, Any]
    failures: int
    skipped: int
    at_s: float
    results: list[dict[str, Any]] = field(default_factory=list)
    failure: dict[str, Any] | None = None

    @classmethod
    def of(cls, request: TrialRequest) -> Memory:
        return cls(
            request.sweep,
            request.number,
            request.values,
            request.failures,
            request.skip,
            time.time(),
        )

    def fail(self, failure: TrialFailed) -> None:
        self.failure = {
            "reason": failure.reason,
            "may_retry": failure.may_retry,
            "details": failure.details,
            "evicted": failure.evicted,
            "at_s": time.time(),
        }


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


class RunningTrial:
    """One trial in its child: results one by one, until the last."""

    def __init__(self, request: TrialRequest, child: Child) -> None:
        self.request = request
        self.child = child
        self._deadline_s = time.monotonic() + request.timeout_s
        self._started_s = time.monotonic()
        self._num_results = 0
        self._last: Metrics = {}
        self.imported: list[str] = []
        self.memory = Memory.of(request)
        self._paused_s = 0.0
        self._turn = asyncio.Lock()  # a save may still be at work when the next result is asked
        self._has_been_ended = False

    def pause(self) -> None:
        """The process waits for the word to go on; its time stands still."""
        self._paused_s = time.monotonic()

    def resume(self) -> None:
        paused_s = time.monotonic() - self._paused_s
        self._deadline_s += paused_s
        self._started_s += paused_s

    def send(self, line: bytes) -> None:
        self.child.writer.write(line)

    def end(self) -> None:
        """End the trial, finished or not; a result that it has sent still comes to who waits."""
        self._has_been_ended = True
        self.child.kill()
        if not self._turn.locked():
            self.child.close()

    async def settle(self, limit_s: float) -> None:
        """Wait until the result that is under way has come, if one is, or for ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s), self._asking():
                pass

    @contextlib.asynccontextmanager
    async def _asking(self) -> AsyncIterator[None]:
        async with self._turn:
            try:
                yield
            finally:
                if self._has_been_ended:
                    self.child.close()

    async def next_result(self) -> dict[str, Any]:
        """Let the trial go on to its next report that is news. Raises TrialFailed."""
        try:
            async with self._asking():
                result = await self._next_report()
                while self._num_results <= self.request.skip and not result["done"]:
                    result = await self._next_report()
        except TrialEnded:
            raise
        except TrialFailed as failure:
            self.memory.fail(failure)
            raise
        self.memory.results.append(result)
        return result

    async def save(self, path: str) -> None:
        """Write the trial's state at its last report to a file. Raises TrialFailed."""
        async with self._asking():
            self.send(json.dumps({"save": path}).encode() + b"\n")
            message = await self._message()
        if message["event"] != "saved":
            raise TrialFailed(message["reason"], details=message.get("details", ""))

    async def _next_report(self) -> dict[str, Any]:
        if self._num_results:
            self.send(GO)
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
        if self._has_been_ended:
            raise TrialEnded("its sweep has ended the trial", may_retry=True)
        self.child.kill()
        raise TrialFailed(death_reason(await self.child.exit_code), may_retry=True)
