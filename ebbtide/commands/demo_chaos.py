"""What the demo does to the cluster while it trains: an eviction, a SIGKILL, a new node."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.platform.chaos import Chaos
from ebbtide.platform.errors import TrainingError
from ebbtide.train.events import read_events
from ebbtide.train.history import AttemptHistory, History

_NOTICE_S = 60.0
_POLL_S = 0.25


@dataclass(frozen=True)
class Plan:
    """After how many finished steps each thing happens."""

    notice_step: int
    kill_step: int
    growth_step: int


@dataclass(frozen=True)
class Disturbances:
    """What happened: the last finished step of each moment, and how long the kill took to mend."""

    notice_step: int
    kill_step: int
    growth_step: int
    kill_to_step_s: float


class Disturber:
    """Watches a run through its events, and drains, kills and adds nodes of its cluster."""

    def __init__(
        self,
        chaos: Chaos,
        run_uri: str,
        training: subprocess.Popen[str],
        say: Callable[[str], None],
    ) -> None:
        self._chaos, self._run_uri, self._training, self._say = chaos, run_uri, training, say

    def carry_out(self, plan: Plan) -> Disturbances:
        """Blocks until the run has gone on after the last of it. Raises if the run ends before."""
        evicted, killed = (node.name for node in self._chaos.usable()[1:3])

        notice_step = self._after_step(plan.notice_step)
        began = self._attempts()
        self._say(f"step {notice_step}: eviction notice for {evicted} ({_NOTICE_S:.0f} s)")
        self._chaos.drain(evicted, _NOTICE_S, take_away=False)
        self._next_attempt(began)
        self._say(f"{evicted} is taken away; the run has left it before")
        self._chaos.take_away(evicted)

        kill_step = self._after_step(plan.kill_step)
        began = self._attempts()
        self._say(f"step {kill_step}: SIGKILL of {killed} and its worker, unannounced")
        killed_s = self._chaos.kill(killed).time_s
        attempt = self._next_attempt(began)
        mended_s = self._first_step_s(attempt.attempt)

        growth_step = self._after_step(plan.growth_step)
        began = self._attempts()
        self._say(f"step {growth_step}: a node is added")
        self._chaos.add()
        self._next_attempt(began)
        return Disturbances(notice_step, kill_step, growth_step, mended_s - killed_s)

    def _history(self) -> History:
        if self._training.poll() is not None:
            raise TrainingError("the run ended before the demo was done with it; see above")
        return History(read_events(self._run_uri))

    def _attempts(self) -> int:
        return len(self._history().attempts)

    def _after_step(self, step: int) -> int:
        """Wait until so many steps are finished; how many there are."""
        while True:
            last = self._history().last
            if last is not None and last.step >= step:
                return last.step
            time.sleep(_POLL_S)

    def _next_attempt(self, began: int) -> AttemptHistory:
        """Wait until an attempt after these has finished a step."""
        while True:
            attempts = self._history().attempts
            if len(attempts) > began and attempts[-1].last_step is not None:
                return attempts[-1]
            time.sleep(_POLL_S)

    def _first_step_s(self, attempt: int) -> float:
        steps = [
            event.time_s
            for event in read_events(self._run_uri)
            if event.kind == "step" and event.attempt == attempt
        ]
        return min(steps)
