"""What becomes of each trial while a sweep runs, call by call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ebbtide.platform.clock import Clock
from ebbtide.tune.config import TuneConfig
from ebbtide.tune.evaluator import TrialFailed
from ebbtide.tune.results import Trial, best

_log = logging.getLogger(__name__)


class Recorder:
    """Keeps the list of trials, in the order of their start, and logs the end of each.

    ``max_steps`` is the length of a trial that nothing ends early.
    """

    def __init__(
        self,
        config: TuneConfig,
        max_steps: int,
        clock: Clock,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self._config = config
        self._max_steps = max_steps
        self._clock = clock
        self._on_trial = on_trial
        self._by_id: dict[str, Trial] = {}

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._by_id.values())

    def started(self, trial_id: str, values: dict[str, Any]) -> None:
        """A trial is started, or started again after a failure."""
        trial = self._by_id.get(trial_id)
        if trial is None:
            trial = Trial(len(self._by_id) + 1, trial_id, values)
            self._by_id[trial_id] = trial
        trial.tries += 1
        trial.reports.clear()
        trial.status, trial.metric, trial.started_at_s = "running", None, self._clock.time()

    def reported(self, trial_id: str, metrics: dict[str, float], finished: bool) -> None:
        """A trial has a result; ``finished`` marks its last."""
        trial = self._by_id[trial_id]
        if trial.reports and trial.reports[-1].get("step") == metrics.get("step"):
            trial.reports.pop()  # the final result repeats the last report
        trial.reports.append(metrics)
        trial.metric = metrics[self._config.metric]
        trial.status = "finished" if finished else "running"

    def failed(self, trial_id: str, failure: TrialFailed) -> None:
        """A trial has failed. A killed one is tried again; an eviction does not count as a try."""
        trial = self._by_id[trial_id]
        if failure.evicted:
            trial.tries -= 1
        times = f" ({trial.tries} times)" if trial.tries > 1 else ""
        trial.reason, trial.details = f"{failure}{times}", failure.details or None
        if failure.may_retry and trial.tries < self._config.max_tries:
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
            at_end = trial.reports[-1].get("step", 0) >= whole
            trial.status = "finished" if at_end else "stopped"
        self._end(trial)

    def _end(self, trial: Trial) -> None:
        trial.seconds = self._clock.time() - trial.started_at_s
        metric = self._config.metric
        outcome = trial.reason if trial.metric is None else f"{metric} {trial.metric:.6g}"
        leader = best(self.trials, self._config.mode)
        so_far = f"; best {leader.metric:.6g}" if leader is not None else ""
        _log.info(
            f"trial {trial.number} of {self._config.num_trials} {trial.status} "
            f"after {trial.seconds:.1f} s: {outcome}{so_far}"
        )
        if self._on_trial is not None:
            self._on_trial(trial)
