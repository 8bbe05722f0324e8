"""Where an evaluator's trials run: one at a time in a child of the zygote, others paused beside it.

Promises: a trial that raises, exits, hangs or is killed fails alone, with its reason; what a trial
goes on from is made again if it is lost.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ebbtide.tune.nursery import Nursery
from ebbtide.tune.running import Memory, RunningTrial, TrialFailed
from ebbtide.tune.states import States
from ebbtide.tune.trial import TrialRequest

_log = logging.getLogger(__name__)
_REMEMBERED = 256
_MAX_PAUSED = 16
_TAKEN_OVER = "taken over"


class Stage:
    """The trial that runs, those that are paused, and the states that were saved. One event loop.

    ``trials_run`` counts the starts.
    """

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._paused: dict[str, RunningTrial] = {}
        self._states = States()
        self._memories: deque[Memory] = deque(maxlen=_REMEMBERED)
        self.trial: RunningTrial | None = None
        self.trials_run = 0

    @property
    def is_taken(self) -> bool:
        """Whether a trial runs, or is paused here."""
        return self.trial is not None or bool(self._paused)

    def running(self, trial_id: str) -> RunningTrial | None:
        """The trial of this name, if it is the one that runs."""
        trial = self.trial
        return trial if trial is not None and trial.request.trial_id == trial_id else None

    async def begin(self, request: TrialRequest, state: str | bytes | None) -> RunningTrial:
        """Start a trial, or let one go on that is paused here; the one that runs ends.

        ``state`` is the file, or its content, that the trial is to go on from. Raises TrialFailed.
        """
        self.end(self.trial)
        paused = self._paused.pop(request.trial_id, None)
        if paused is not None and not paused.child.exit_code.done():
            paused.resume()
            self.trial = paused
            return paused
        if isinstance(state, bytes):
            state = self._states.new(_TAKEN_OVER, state)
        if request.lineage and (state is None or not os.path.exists(state)):
            state = await self._made_again(request)
        trial = await self._run(replace(request, source=state))
        self._memories.append(trial.memory)
        self.trials_run += 1
        return trial

    async def _run(self, request: TrialRequest) -> RunningTrial:
        trial = RunningTrial(request, await self._nursery.child())
        trial.send(request.line())
        self.trial = trial
        return trial

    async def _made_again(self, request: TrialRequest) -> str:
        """The state that the request goes on from, by running what led to it."""
        _log.info("trial %d: making again the state that it goes on from", request.number)
        path: str | None = None
        for generation, (values, count) in enumerate(request.lineage):
            trial = await self._run(replace(request, values=values, source=path, skip=0))
            for _ in range(count):
                await trial.next_result()
            path = self._states.new(f"{_TAKEN_OVER} {generation}")
            await trial.save(path)
            self.end(trial)
        assert path is not None
        return path

    async def next_result(self, trial: RunningTrial) -> dict[str, Any]:
        """A trial's next result; ``done`` marks the last. Raises TrialFailed."""
        try:
            result = await trial.next_result()
        except TrialFailed:
            self.end(trial)
            raise
        if result["done"]:
            self.end(trial)
        return result

    async def save(self, trial: RunningTrial, name: str) -> str:
        """Keep a trial's state, at its last report; the file with it. Raises TrialFailed."""
        path = self._states.new(name)
        await trial.save(path)
        return path

    def state(self, name: str) -> bytes | None:
        """A saved state; None if it is lost."""
        return self._states.read(name)

    def drop(self, names: Collection[str]) -> None:
        """Let go of states."""
        self._states.drop(names)

    def pause(self, trial: RunningTrial) -> None:
        """Keep a trial's process, at its last report, until it begins again or is forgotten.

        Of too many the one that is paused for longest ends; it would start again.
        """
        trial.pause()
        self.trial, self._paused[trial.request.trial_id] = None, trial
        if len(self._paused) > _MAX_PAUSED:
            self._paused.pop(next(iter(self._paused))).end()

    def forget(self, trial_id: str) -> None:
        """End a paused trial."""
        paused = self._paused.pop(trial_id, None)
        if paused is not None:
            paused.end()

    def end(self, trial: RunningTrial | None) -> None:
        """End a trial, whether it has finished or not; nothing of it is left."""
        if trial is not None:
            trial.end()
            if self.trial is trial:
                self.trial = None

    def clear(self) -> None:
        """End all trials, and let go of all states."""
        self.end(self.trial)
        for trial_id in list(self._paused):
            self.forget(trial_id)
        self._states.clear()

    async def settle(self, limit_s: float, sweep: str | None = None) -> None:
        """End the trial that runs, if it is of the ``sweep``; one that is about to tell a result
        has ``limit_s`` for that."""
        trial = self.trial
        if trial is not None and sweep in (None, trial.request.sweep):
            await trial.settle(limit_s)
            if self.trial is trial:
                self.end(trial)

    def memories(self, sweep: str) -> list[Memory]:
        """What came of a sweep's newest trials here."""
        return [memory for memory in self._memories if memory.sweep == sweep]
