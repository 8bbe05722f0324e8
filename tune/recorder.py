"""What becomes of each trial while a sweep runs, call by call, and the journal of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Protocol

from ebbtide.platform.clock import Clock
from ebbtide.tune.config import TuneConfig
from ebbtide.tune.past import Past
from ebbtide.tune.results import Trial, best
from ebbtide.tune.running import TrialFailed

_log = logging.getLogger(__name__)


class Diary(Protocol):
    """Where news are written; see :class:`ebbtide.tune.journal.Journal`."""

    def write(self, event: str, **fields: Any) -> None: ...


class NoDiary:
    """For a sweep that nobody will continue."""

    def write(self, event: str, **fields: Any) -> None:
        return None


class Recorder:
    """Keeps the list of trials, logs the end of each, and writes what is news to the ``journal``.

    ``max_steps`` is the length of a trial that nothing ends early, if it is known. ``past`` knows
    what is told again from an earlier driver: it is neither written nor logged a second time.
    ``usd_per_hour`` tells the price of the seat that a trial runs on.
    """

    def __init__(
        self,
        config: TuneConfig,
        max_steps: int | None,
        clock: Clock,
        on_trial: Callable[[Trial], None] | None = None,
        *,
        past: Past | None = None,
        journal: Diary | None = None,
        usd_per_hour: Callable[[str], Decimal | None] = lambda trial_id: None,
    ) -> None:
        self._config = config
        self._max_steps = max_steps
        self._clock = clock
        self._on_trial = on_trial
        self._past = past or Past()
        self._journal = journal or NoDiary()
        self._usd_per_hour = usd_per_hour
        self._num_trials = config.num_trials
        self._leader: Trial | None = None
        self._by_id: dict[str, Trial] = {}
        self._failures: dict[str, int] = {}
        self._heard: dict[str, int] = {}  # results of a try that has not failed
        self._kept: dict[str, int] = {}  # reports that were there when it took over a state
        self._lost: dict[str, list[dict[str, float]]] = {}  # reports before a start, until it tells

    @property
    def trials(self) -> tuple[Trial, ...]:
        """In the order of their first start."""
        return tuple(sorted(self._by_id.values(), key=lambda trial: trial.number))

    def number(self, trial_id: str) -> int:
        return self._by_id[trial_id].number

    def heard(self, trial_id: str) -> int:
        """How many results a trial has had since it last began."""
        return self._heard.get(trial_id, 0)

    def beginnings(self, trial_id: str) -> int:
        """How often a trial has begun anew: after a failure, or from another's state."""
        return self._failures.get(trial_id, 0) + len(self._by_id[trial_id].taken_over)

    def took_over(
        self, trial_id: str, values: dict[str, Any], source: str, step: float | None
    ) -> None:
        """A trial goes on from another's state at ``step``, with values of its own."""
        trial = self._by_id[trial_id]
        number = self._by_id[source].number
        trial.taken_over.append({"step": step, "from": number, "values": values})
        trial.values, self._heard[trial_id] = values, 0
        trial.reports = [*self._lost.pop(trial_id, ()), *trial.reports]
        self._kept[trial_id] = len(trial.reports)
        if len(trial.taken_over) > self._past.num_taken_over(trial.number):
            self._journal.write("took_over", trial=trial.number, **trial.taken_over[-1])

    def goes_on(self, trial_id: str, step: float | None) -> None:
        """A trial that has failed begins anew, and not at its first step: from the state that it
        took over last or, if there is a ``step``, from its own at that one."""
        lost, kept = self._lost.pop(trial_id, None), self._kept.get(trial_id, 0)
        if lost is not None:
            since = [] if step is None else [r for r in lost[kept:] if r.get("step", 0) <= step]
            self._by_id[trial_id].reports = [*lost[:kept], *since]

    def started(self, trial_id: str, values: dict[str, Any]) -> None:
        """A trial is started: for the first time, after a failure or after a pause."""
        trial = self._by_id.get(trial_id)
        if trial is None:
            trial = Trial(self._past.claim(trial_id, values), trial_id, values)
            self._by_id[trial_id] = trial
            if not self._past.is_recorded(trial.number):
                self._journal.write("started", trial=trial.number, values=values)
        if trial_id in self._heard:
            return
        self._heard[trial_id] = 0
        trial.tries += 1
        before = trial.reports or self._lost.get(trial_id, [])  # it may fail before it has told
        self._lost[trial_id], trial.reports = before, []
        trial.status, trial.metric, trial.started_at_s = "running", None, self._clock.time()
        if self._past.has_answer(trial_id):
            trial.started_at_s = self._past.started_at_s(trial.number)

    def reported(
        self, trial_id: str, metrics: dict[str, float], finished: bool, seconds: float
    ) -> None:
        """A trial has a result after ``seconds``; ``finished`` marks its last."""
        trial = self._by_id[trial_id]
        trial.seconds = seconds
        self._heard[trial_id] += 1
        self._lost.pop(trial_id, None)
        if not self._past.is_telling:
            self._journal.write(
                "reported", trial=trial.number, metrics=metrics, finished=finished, seconds=seconds
            )
        if trial.reports and trial.reports[-1].get("step") == metrics.get("step"):
            trial.reports.pop()  # the final result repeats the last report
        trial.reports.append(metrics)
        trial.metric = metrics[self._config.metric]
        trial.status = "finished" if finished else "running"

    def failed(self, trial_id: str, failure: TrialFailed) -> None:
        """A trial has failed. A killed one is tried again; an eviction does not count as a try."""
        trial = self._by_id[trial_id]
        self._failures[trial_id] = self._failures.get(trial_id, 0) + 1
        self._heard.pop(trial_id, None)
        if not self._past.is_telling:
            self._journal.write(
                "failed",
                trial=trial.number,
                reason=failure.reason,
                may_retry=failure.may_retry,
                details=failure.details,
                evicted=failure.evicted,
            )
        if failure.evicted:
            trial.tries -= 1
        times = f" ({trial.tries} times)" if trial.tries > 1 else ""
        trial.reason, trial.details = f"{failure}{times}", failure.details or None
        if failure.may_retry and trial.tries < self._config.max_tries:
            if not self._past.is_telling:
                _log.warning("trial %d: %s; trying again", trial.number, failure)
            return
        trial.status, trial.metric = "failed", None
        self._end(trial)

    def completed(self, trial_id: str) -> None:
        """A trial has ended well: by itself, or stopped by the scheduler."""
        trial = self._by_id[trial_id]
        trial.reason = trial.details = None
        if trial.status == "running":  # schedulers stop trials at the last step, too
            whole = trial.values.get("steps", self._max_steps)
            at_end = whole is not None and trial.reports[-1].get("step", 0) >= whole
            trial.status = "finished" if at_end else "stopped"
        self._end(trial)

    def cut(self, why: str) -> None:
        """The sweep ends here: what runs has stopped, and would go on if the sweep did."""
        for trial in self._by_id.values():
            if trial.status == "running":
                trial.status, trial.reason = "stopped", why

    def _end(self, trial: Trial) -> None:
        self._leader = best([*filter(None, [self._leader]), trial], self._config.mode)
        recorded = self._past.ended(trial.number)
        if recorded is not None:
            trial.seconds, trial.started_at_s = recorded["seconds"], recorded["started_at_s"]
            trial.usd = None if recorded["cost"] is None else Decimal(recorded["cost"])
            return
        if not self._past.is_recorded(trial.number):  # else what it took its last process
            trial.seconds = self._clock.time() - trial.started_at_s
        price = self._usd_per_hour(trial.trial_id)
        trial.usd = None if price is None else price * Decimal(trial.seconds) / 3600
        self._journal.write(
            "ended",
            trial=trial.number,
            status=trial.status,
            seconds=trial.seconds,
            started_at_s=trial.started_at_s,
            cost=trial.usd,
        )
        metric = self._config.metric
        outcome = trial.reason if trial.metric is None else f"{metric} {trial.metric:.6g}"
        so_far = f"; best {self._leader.metric:.6g}" if self._leader is not None else ""
        _log.info(
            f"trial {trial.number} of {self._num_trials} {trial.status} "
            f"after {trial.seconds:.1f} s: {outcome}{so_far}"
        )
        if self._on_trial is not None:
            self._on_trial(trial)
