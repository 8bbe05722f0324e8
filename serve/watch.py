"""Which workers hang: a look at each request that waits for one, at the moment when it is due.

Silence alone differs from slowness only in time: ``stall_s``, after a request's first token. So a
worker that has said nothing to a request for a moment is asked for a sign of life, over a
connection of its own. A process that is stopped or a machine that is gone gives none, and a replica
whose engine is stopped says so; both are known before ``stall_s``. A sign of life never makes an
engine wait longer than ``stall_s``, as one that hangs may well be busy.

Promises: a worker is only left for another one that looks well; silence during which the router
itself had no turn counts for nobody; nothing is asked while no request waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from ebbtide.serve.fleet import Fleet, Worker
from ebbtide.serve.router_metrics import RouterMetrics
from ebbtide.serve.worker_client import Leg, Lost, WorkerClient

log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""At least so often, for what workers say of themselves."""
_SOON_S = 0.005
_LATE_S = 0.05
"""A router that wakes later than it wanted by more than this has been kept from hearing, too."""
ASK_AFTER_S = 0.4
"""Silence after which a worker is asked for a sign of life, and again after as long."""
ANSWER_S = 0.8
"""For an answer that takes no work; twice as long where a first token is waited for, whose prompt
may keep a worker busy."""


@dataclass(eq=False)
class Sign:
    """What a worker was last asked: when, and whether it has answered that its engine is stopped.

    ``asked_s`` is of the first question since the last answer.
    """

    asked_s: float | None = None
    answered_s: float = 0.0
    is_stopped: bool = False
    task: asyncio.Task[None] | None = None


def fault(leg: Leg, sign: Sign | None, now_s: float, stall_s: float) -> str | None:
    """Why nothing is to be expected of a request's worker for now, if so.

    A second worker that is slow is no better than the first, so a stream moves once for silence.
    """
    spoke_s = leg.worker.output_s  # a token is a sign of life, too
    if sign is not None and sign.is_stopped and sign.answered_s > spoke_s:
        return "its engine is stopped"
    if leg.has_moved:
        return None
    asked_s = None if sign is None else sign.asked_s
    patience_s = ANSWER_S if leg.has_begun else 2 * ANSWER_S
    if asked_s is not None and asked_s > spoke_s and now_s - asked_s >= patience_s:
        return "it gives no sign of life"
    if leg.has_begun and now_s - leg.worker.output_s >= stall_s:
        return f"it has given no token for {stall_s:g} s"
    return None


def silent_since(leg: Leg) -> float:
    """When a request last heard of its worker, or another request did."""
    return max(leg.asked_s, leg.worker.output_s)


class Watch:
    """Over the requests that a router's client has at workers. All in one event loop."""

    def __init__(
        self, fleet: Fleet, client: WorkerClient, metrics: RouterMetrics, stall_s: float
    ) -> None:
        self._fleet, self._client, self._metrics = fleet, client, metrics
        self._stall_s = stall_s
        self._signs: dict[Worker, Sign] = {}

    async def run(self) -> None:
        """Let go of workers that hang; for the life of the router."""
        was_late = False
        while True:
            if not self._client.legs:
                self._forget(set(self._signs))
                await self._client.is_busy.wait()
            began_s, pause_s = time.monotonic(), self._pause_s(time.monotonic())
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            if (late_s := now_s - began_s - pause_s) > _LATE_S:
                self._excuse(late_s, now_s)
                was_late = not was_late
                if was_late:
                    continue  # what has come meanwhile is read first
            was_late = False
            self._fleet.forget_silent(now_s)
            self._ask(now_s)
            for leg in list(self._client.legs):
                if why := self.hangs(leg, now_s):
                    log.warning("worker %s hangs: %s", leg.worker.last.worker_id, why)
                    self._metrics.hangs.inc()
                    leg.worker.shunned_until_s = now_s + self._stall_s
                    leg.let_go()

    def hangs(self, leg: Leg, now_s: float) -> str | None:
        """Why a request's worker is to be left, if it is.

        An engine may just be busy; so it is left for another one, or when it is given up. One whose
        client does not take what it says is not silent.
        """
        worker = leg.worker
        if worker.is_gone(now_s):
            return "it has long been silent"
        if leg.is_sending or not leg.can_move:
            return None
        why = fault(leg, self._signs.get(worker), now_s, self._stall_s)
        if why is None and not worker.is_ready(now_s):
            why = "it does not look well"
        if why is None or worker.last.is_leaving:
            return None
        is_bound = leg.is_bound or leg.has_begun
        own = worker.last.generation if is_bound else None
        spare = self._fleet.for_decode([], now_s, {worker.last.url}, own)
        return why if spare is not None and spare.is_ready(now_s) else None

    def _pause_s(self, now_s: float) -> float:
        """Until something can be due."""
        due_s = now_s + _LOOK_S
        for leg in self._client.legs:
            sign, since_s = self._signs.get(leg.worker), silent_since(leg)
            if leg.has_begun and not leg.has_moved:
                due_s = _sooner(due_s, leg.worker.output_s + self._stall_s, now_s)
            if sign is not None and sign.asked_s is not None:
                due_s = _sooner(due_s, sign.asked_s + ANSWER_S, now_s)
            elif not leg.is_sending:
                asked_s = 0.0 if sign is None else sign.answered_s
                due_s = _sooner(due_s, max(since_s, asked_s) + ASK_AFTER_S, now_s)
        return max(_SOON_S, due_s - now_s)

    def _excuse(self, late_s: float, now_s: float) -> None:
        """Have nobody pay for a time in which this process could not hear."""
        for worker in {leg.worker for leg in self._client.legs}:
            worker.output_s = min(now_s, worker.output_s + late_s)
        for leg in self._client.legs:
            leg.asked_s = min(now_s, leg.asked_s + late_s)
        for sign in self._signs.values():
            sign.asked_s = None if sign.asked_s is None else sign.asked_s + late_s

    def _ask(self, now_s: float) -> None:
        """Ask those that are silent, and forget what those have said that nobody waits for."""
        waiting = {leg.worker for leg in self._client.legs if not leg.is_sending}
        self._forget(self._signs.keys() - waiting)
        for leg in self._client.legs:
            sign = self._signs.get(leg.worker)
            if leg.is_sending or now_s - silent_since(leg) < ASK_AFTER_S:
                continue
            is_open = sign is not None and sign.task is not None and not sign.task.done()
            if not is_open and (sign is None or now_s - sign.answered_s >= ASK_AFTER_S):
                sign = self._signs.setdefault(leg.worker, Sign())
                sign.asked_s = now_s if sign.asked_s is None else sign.asked_s
                sign.task = asyncio.create_task(self._answer(leg.worker, sign))

    def _forget(self, workers: set[Worker]) -> None:
        for worker in workers:
            if (task := self._signs.pop(worker).task) is not None:
                task.cancel()

    async def _answer(self, worker: Worker, sign: Sign) -> None:
        """What a worker answers; one that breaks off is no matter of silence, as a time-out is."""
        is_stopped = False
        try:
            is_stopped = await self._client.is_stopped(worker)
        except Lost as lost:
            log.info("worker %s cannot be asked: %s", worker.last.worker_id, lost)
            if isinstance(lost.__cause__, TimeoutError):
                return
        sign.is_stopped, sign.asked_s, sign.answered_s = is_stopped, None, time.monotonic()


def _sooner(due_s: float, other_s: float, now_s: float) -> float:
    """What is overdue already was looked at, and led to nothing."""
    return min(due_s, other_s) if other_s > now_s else due_s
