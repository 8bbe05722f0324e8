"""The seats of a pool where Ray Tune expects resources and actors of its own.

A trial gets a seat, and a handle whose calls go to the seat's actor. What an earlier driver has
heard of a trial is answered from its record, and the trial starts only when more is asked of it.
Promises: every seat that was taken is given back, with word of whether its actor is broken or is
another sweep's now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from pyarrow.fs import LocalFileSystem
from ray.air.execution.resources.request import AcquiredResources
from ray.air.execution.resources.resource_manager import ResourceManager
from ray.exceptions import RayActorError, RayTaskError
from ray.train._internal.session import _TrainingResult
from ray.tune import Checkpoint
from ray.tune.result import TRIAL_INFO

from ebbtide.platform.ray_seam.tune_states import SavedState, SavedStates
from ebbtide.platform.ray_seam.tune_sweep import PooledSweep


class _Call:
    def __init__(self, submit: Callable[..., Any]) -> None:
        self._submit = submit

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._submit(*args, **kwargs)


class _TrialHandle:
    """Stands where Tune expects the handle of a trial's own actor; the calls go to a seat's.

    A trial begins with the first result that is asked of it and is not on record. While ``pauses``
    is set a save, or stop, is a pause: the seat keeps the trial's process.
    """

    def __init__(self, acquired: _SeatAcquired, config: dict[str, Any]) -> None:
        self._acquired, self._sweep = acquired, acquired.sweep
        self._trial_id = config[TRIAL_INFO].trial_id
        self._values = {key: value for key, value in config.items() if not key.startswith("__")}
        self._is_home = self._go_home()
        self._request = self._new_request()
        self._source: SavedState | None = self._sweep.states.base.get(self._trial_id)
        self._go_on_elsewhere()
        self._has_begun = False
        self.pauses = False
        self._newest: Any = None  # result
        ready = ray.put(None)
        self.__ray_ready__ = _Call(lambda: ready)
        self.get_auto_filled_metrics = _Call(dict)  # asked at the start; the results bring all
        self.train = _Call(self._next_result)
        self.save = _Call(self._save)
        self.restore = _Call(self._restore)
        self.stop = _Call(self._stop)

    def _new_request(self) -> Any:
        return self._sweep.trials.request(self._trial_id, self._values, self._acquired.seat)

    def _go_home(self) -> bool:
        """Take the seat that keeps the paused trial; if that is busy, start again on this one."""
        home = self._sweep.paused.get(self._trial_id)
        if home is None:
            return False
        self._acquired.seat = self._sweep.pool.swap(self._acquired.seat, home)
        if self._acquired.seat is not home:
            self._sweep.forget(self._trial_id)
            return False
        del self._sweep.paused[self._trial_id]
        return True

    def _go_on_elsewhere(self) -> None:
        """Go on from the state that was saved at the pause, where the process is not at hand."""
        state = self._sweep.states.paused.get(self._trial_id)
        heard = self._sweep.trials.heard(self._trial_id)
        if state is not None and heard and not self._is_home:
            self._source = state
            self._request = replace(self._request, skip=self._request.skip - heard)

    def _present_state(self, heard: int) -> SavedState:
        """The state at the newest result, which the sweep is to hear of if ``heard`` is 1."""
        states: SavedStates = self._sweep.states
        return states.add(
            self._trial_id,
            (self._request.values, self._sweep.trials.heard(self._trial_id) + heard),
            ray.get(self._newest).get("step"),
            self._acquired.seat,
            self._sweep.sweep_id,
            running=self._has_begun,
        )

    def _next_result(self, *_: Any, **__: Any) -> Any:
        past, trial_id = self._sweep.past, self._trial_id
        if past.has_answer(trial_id):
            answer = past.answer(trial_id)
            if isinstance(answer, BaseException):
                answer = RayTaskError("next_result", str(answer), answer)
            told = ray.put(answer)
            self._sweep.told[told] = trial_id
            self._newest = told
        elif self._has_begun:
            actor = self._acquired.seat.actor
            self._newest = actor.next_result.remote(self._sweep.sweep_id, trial_id)
        else:
            self._newest = self._begin()
        return self._newest

    def _begin(self) -> Any:
        self._has_begun = True
        actor, request, state = self._acquired.seat.actor, self._request, None
        if self._source is not None:
            request = replace(request, lineage=self._source.lineage)
            if not self._is_home:
                state = self._source.on(self._acquired.seat, self._sweep.sweep_id)
        seat, calls = self._acquired.seat, self._acquired.seat.unordered
        seat.unordered = ()
        return actor.begin.remote(self._sweep.sweep_id, request, state, calls)

    def _save(self) -> Any:
        """Save for other trials; or for a pause, of which Ray need not know."""
        states, trial_id = self._sweep.states, self._trial_id
        if self.pauses:
            if self._sweep.saves_pauses:  # the result is heard by now
                states.paused[trial_id] = self._present_state(heard=0)
            return self._at_once(_TrainingResult(checkpoint=None, metrics={}))
        # The scheduler, which asks for this, hears of a result before the sweep does.
        state = states.newest[trial_id] = self._present_state(heard=1)
        states.drop_unused(self._sweep.sweep_id)
        checkpoint = Checkpoint(state.name, LocalFileSystem())
        metrics = dict(ray.get(self._newest))
        return self._at_once(_TrainingResult(checkpoint=checkpoint, metrics=metrics))

    def _restore(self, found: Any) -> Any:
        """Begin from another trial's state; or, after a failure, from the newest of its own.

        Else the trial's process goes on, or all since its last beginning is made again.
        """
        states, trials, trial_id = self._sweep.states, self._sweep.trials, self._trial_id
        source = states.by_name[found.checkpoint.path]
        takes_over = trial_id in states.taking_over
        if takes_over or not trials.heard(trial_id):
            states.began(trial_id, source)
            self._source = source
            if not takes_over:
                trials.goes_on(trial_id, source.step if source.trial_id == trial_id else None)
        if takes_over:
            trials.took_over(trial_id, self._values, source.trial_id, source.step)
            self._request = self._new_request()
        return self._at_once(None)

    def _at_once(self, answer: Any) -> Any:
        there = ray.put(answer)
        if not self._sweep.past.is_over():
            self._sweep.at_once.add(there)
        return there

    def _stop(self) -> Any:
        if not self._has_begun:
            return ray.put(None)
        seat = self._acquired.seat
        if self.pauses:
            self._sweep.paused[self._trial_id] = seat
        end = seat.actor.pause if self.pauses else seat.actor.stop
        ended = end.remote(self._sweep.sweep_id, self._trial_id, seat.unordered)
        seat.unordered = (ended,) if self.pauses else ()
        self._acquired.stopped = ended
        return ended


class _TrialClass:
    """Stands where Tune expects a trial's actor class."""

    def __init__(self, acquired: _SeatAcquired) -> None:
        self._acquired = acquired

    def remote(self, *, config: dict[str, Any], **_: Any) -> _TrialHandle:
        return _TrialHandle(self._acquired, config)


@dataclass
class _SeatAcquired(AcquiredResources):  # type: ignore[misc]  # Ray is untyped
    seat: Any = None
    sweep: Any = None
    broken: bool = False
    stopped: Any = None

    def _annotate_remote_entity(self, entity: Any, bundle: Any, bundle_index: int) -> Any:
        return _TrialClass(self)

    def look_at_the_end(self) -> tuple[bool, bool]:
        """Whether the seat's actor is known to have died, and whether it is another sweep's now."""
        if self.broken or self.stopped is None:
            return self.broken, False
        ready, _ = ray.wait([self.stopped], timeout=0)
        try:
            return False, any(ray.get(ready))
        except (RayActorError, RayTaskError):
            return True, False


class SeatManager(ResourceManager):  # type: ignore[misc]  # Ray is untyped
    def __init__(self, sweep: PooledSweep) -> None:
        self.sweep = sweep
        self._requests: list[Any] = []

    def request_resources(self, resource_request: Any) -> None:
        self._requests.append(resource_request)

    def cancel_resource_request(self, resource_request: Any) -> None:
        self._requests.remove(resource_request)

    def has_resources_ready(self, resource_request: Any) -> bool:
        return resource_request in self._requests and self.sweep.pool.any_free()

    def acquire_resources(self, resource_request: Any) -> Any:
        seat = self.sweep.pool.take()
        if seat is None:
            return None
        self._requests.remove(resource_request)
        return _SeatAcquired(resource_request=resource_request, seat=seat, sweep=self.sweep)

    def free_resources(self, acquired_resource: Any) -> None:
        broken, yielded = acquired_resource.look_at_the_end()
        self.sweep.pool.give_back(acquired_resource.seat, broken=broken, yielded=yielded)

    def get_resource_futures(self) -> list[Any]:
        return self.sweep.pool.pending()

    def update_state(self) -> None:
        self.sweep.pool.poll()

    def clear(self) -> None:
        self._requests = []
