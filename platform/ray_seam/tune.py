"""Ray Tune's controller, made to run its trials on actors that it has not started.

Ray Tune starts an actor for each trial. Here its controller gets a resource manager that hands out
the seats of a pool instead (:mod:`ebbtide.platform.ray_seam.tune_seats`), and an actor manager that
never kills one. What an earlier driver has heard is told again first, in the order of then.
Promises: no result of a running trial is worked on before the record is over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.air.execution._internal.actor_manager import RayActorManager
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from ebbtide.platform.ray_seam import environment
from ebbtide.platform.ray_seam.tune_registry import remembered
from ebbtide.platform.ray_seam.tune_seats import SeatManager
from ebbtide.platform.ray_seam.tune_sweep import PooledSweep

_IDLE_S = 0.05
_QUIET_S = 15.0


class _SeatActors(RayActorManager):  # type: ignore[misc]  # Ray is untyped
    """Ray's manager of trial actors, except that it never kills a member of the pool."""

    def __init__(self, resource_manager: SeatManager) -> None:
        super().__init__(resource_manager=resource_manager)
        self._sweep = resource_manager.sweep
        self._quiet_since_s: float | None = None
        self._is_in_order = True

    def next(self, timeout: float | None = None) -> bool:
        self._resource_manager.update_state()
        started_s = time.monotonic()
        tells = not self._sweep.past.is_over() or bool(self._sweep.told)
        if self._tell(timeout or 0.0) if tells else super().next(timeout=timeout):
            self._quiet_since_s = None
            return True
        # With nothing to wait for, Ray does not wait at all: its loop would spin.
        time.sleep(max(0.0, _IDLE_S - (time.monotonic() - started_s)))
        return False

    def _tell(self, timeout: float) -> bool:
        """One event of a time when not all is told: a start, a pause, an end, or what is due."""
        if self._try_kill_actor():
            return True
        self._try_start_actors()
        state = self._actor_state_events.get_futures()
        told, tasks = self._sweep.told, self._actor_task_events.get_futures()
        for future in set(told) - tasks:
            del told[future]  # its trial was stopped
        for future in self._sweep.at_once & tasks:
            self._sweep.at_once.discard(future)
            self._actor_task_events.resolve_future(future)
            return True
        by_trial = {trial_id: future for future, trial_id in told.items()}
        due = self._sweep.past.due()
        ready, _ = ray.wait(list(state), timeout=0) if state else ([], [])
        if not ready and due not in by_trial and (self._is_in_order or not by_trial):
            others = [*state, *self._resource_manager.get_resource_futures()]
            ready, _ = ray.wait(others, timeout=timeout) if others else ([], [])
            self._is_in_order = bool(ready) or not self._has_long_been_quiet()
        if not self._is_in_order and due not in by_trial:
            due = self._sweep.past.earliest(list(by_trial))
        if ready and ready[0] in state:
            self._actor_state_events.resolve_future(ready[0])
        elif due in by_trial:
            del told[by_trial[due]]
            with self._sweep.past.telling(due):
                self._actor_task_events.resolve_future(by_trial[due])
        else:
            return False
        self._try_start_actors()
        return True

    def _has_long_been_quiet(self) -> bool:
        """Whether what is due does not come: the sweep goes another way, or has fewer seats."""
        now_s = time.monotonic()
        self._quiet_since_s = self._quiet_since_s or now_s
        return now_s - self._quiet_since_s > _QUIET_S

    def _try_kill_actor(self) -> bool:
        if not self._live_actors_to_kill:
            return False
        tracked = self._live_actors_to_kill.pop()
        self._mark_broken(tracked)
        self._cleanup_actor_futures(tracked)
        self._actor_stop_resolved(tracked)
        return True

    def _mark_broken(self, tracked: Any) -> None:
        if tracked in self._live_actors_to_ray_actors_resources:
            self._live_actors_to_ray_actors_resources[tracked][1].broken = True

    def _actor_start_failed(self, tracked_actor: Any, exception: Exception) -> None:
        self._mark_broken(tracked_actor)
        super()._actor_start_failed(tracked_actor, exception)

    def _actor_task_failed(self, tracked_actor_task: Any, exception: Exception) -> None:
        if not isinstance(exception, RayTaskError | RayActorError):
            exception = ActorDiedError()  # Ray Tune knows no other
        lost = isinstance(exception, RayTaskError) and self._sweep.trials.is_lost(exception.cause)
        if lost or isinstance(exception, RayActorError):
            self._mark_broken(tracked_actor_task._tracked_actor)
        super()._actor_task_failed(tracked_actor_task, exception)

    def cleanup(self) -> None:
        for _, acquired in self._live_actors_to_ray_actors_resources.values():
            self._resource_manager.free_resources(acquired)
        self._resource_manager.clear()
        self.__init__(resource_manager=self._resource_manager)  # type: ignore[misc]  # as Ray does


class _NoAnalysis:
    """In the place of Ray's account of a sweep, for which it reads the snapshot and imports
    pandas."""

    trials = ()

    def __init__(self, **_: Any) -> None:
        pass


def _will_pause(trial: Any, pauses: bool) -> None:
    handle = trial.temporary_state.ray_actor
    if handle is not None:
        handle.pauses = pauses


@contextlib.contextmanager
def pooled(sweep: PooledSweep) -> Iterator[None]:
    """Inside, ``Tuner.fit`` runs its trials on the sweep's pool. What it returns is empty: the
    sweep's trials have heard all results."""
    for name, value in environment.SWEEP.items():
        os.environ.setdefault(name, value)
    import ray.tune.tune
    from ray.tune.execution.tune_controller import TuneController

    for name in ("ray.tune.tune", "ray.tune.analysis.experiment_analysis"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # they repeat the failures

    class PooledController(TuneController):  # type: ignore[misc]  # Ray is untyped
        def __init__(self, **kwargs: Any) -> None:
            kwargs["reuse_actors"] = False
            super().__init__(**kwargs)
            self._actor_manager = _SeatActors(resource_manager=SeatManager(sweep))
            sweep.states.referenced = self._states_in_use
            self._has_decided = self._is_pausing = False

        def checkpoint(self, force: bool = False, wait: bool = False) -> None:
            """The sweep's own journal takes the place of Ray's snapshots."""

        def _states_in_use(self) -> list[str]:
            return [trial.checkpoint.path for trial in self._live_trials if trial.checkpoint]

        def _execute_action(self, trial: Any, decision: str, after_save: bool = False) -> None:
            self._has_decided = True
            try:
                super()._execute_action(trial, decision, after_save)
            finally:
                self._has_decided = False

        def _schedule_trial_pause(self, trial: Any, should_checkpoint: bool = True) -> None:
            """Pause a trial; a scheduler that does so itself, and saves nothing, gives it another
            trial's state next."""
            if not self._has_decided and not should_checkpoint:
                sweep.states.taking_over.add(trial.trial_id)
                super()._schedule_trial_pause(trial, should_checkpoint)
                return
            _will_pause(trial, True)
            if not sweep.saves_pauses:
                # There is nothing to save, and Ray's HyperBand forgets for ever a trial that is
                # being saved when the last one of its bracket is done: the sweep would not end.
                should_checkpoint = False
            elif not should_checkpoint:
                sweep.states.pauses(trial.trial_id)
            self._is_pausing = True
            try:
                super()._schedule_trial_pause(trial, should_checkpoint)
            finally:
                self._is_pausing = False

        def _schedule_trial_stop(self, trial: Any, exception: Any = None) -> None:
            """Stop a trial. One without an actor may be paused, one that is saved was to be."""
            if trial not in self._trial_to_actor:
                sweep.forget(trial.trial_id)
            if not self._is_pausing:
                _will_pause(trial, False)
                if exception is None and trial.trial_id not in sweep.states.taking_over:
                    sweep.states.ended(trial.trial_id)
            super()._schedule_trial_stop(trial, exception=exception)

        def _process_trial_failure(self, trial: Any, exception: Any) -> None:
            """Try a killed trial again, as often as the sweep allows; a wrong one never."""
            sweep.states.lost(trial.trial_id)
            if not sweep.trials.may_retry(trial.trial_id, exception):
                trial.max_failures = 0
            super()._process_trial_failure(trial, exception)

    loop = ray.tune.tune
    originals = loop.TuneController, loop.ExperimentAnalysis
    loop.TuneController, loop.ExperimentAnalysis = PooledController, _NoAnalysis
    try:
        with remembered():
            yield
    finally:
        loop.TuneController, loop.ExperimentAnalysis = originals
