"""Ray Tune's controller, made to run its trials on actors that it has not started.

Ray Tune starts an actor for each trial. Here its controller gets a resource manager that hands out
the seats of a pool instead, and an actor manager that never kills one. Promises: every seat that
was taken is given back, with word of whether its actor is broken.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.air.execution._internal.actor_manager import RayActorManager
from ray.air.execution.resources.request import AcquiredResources
from ray.air.execution.resources.resource_manager import ResourceManager
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.tune.result import TRIAL_INFO

from ebbtide.platform.ray_seam import environment

_IDLE_S = 0.05


class Seats(Protocol):
    """What the controller asks of a pool. A seat has its actor's handle as ``actor``."""

    def poll(self) -> None: ...
    def any_free(self) -> bool: ...
    def take(self) -> Any | None: ...
    def give_back(self, seat: Any, *, broken: bool) -> None: ...
    def pending(self) -> list[Any]: ...


@dataclass
class PooledSweep:
    """One sweep's use of a pool, whose actors have ``start``, ``next_result`` and ``stop``.

    ``request_of`` makes what an actor is asked to run of a trial's id and sampled values.
    ``may_retry`` hears of every failure of a trial, whatever Ray raises for a call to its actor,
    and decides. ``is_lost`` tells the actors' own errors by which a seat is no longer the sweep's.
    """

    pool: Seats
    sweep_id: str
    request_of: Callable[[str, dict[str, Any]], Any]
    may_retry: Callable[[str, BaseException], bool]
    is_lost: Callable[[BaseException], bool]


class _Call:
    def __init__(self, submit: Callable[[], Any]) -> None:
        self._submit = submit

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._submit()


class _TrialHandle:
    """Stands where Tune expects the handle of a trial's own actor; the calls go to a seat's."""

    def __init__(self, acquired: _SeatAcquired, config: dict[str, Any]) -> None:
        sweep, actor = acquired.sweep, acquired.seat.actor
        trial_id = config[TRIAL_INFO].trial_id
        values = {key: value for key, value in config.items() if not key.startswith("__")}
        started = actor.start.remote(sweep.sweep_id, sweep.request_of(trial_id, values))
        self.__ray_ready__ = _Call(lambda: started)
        self.get_auto_filled_metrics = _Call(dict)  # asked at the start; the results bring all
        self.train = _Call(lambda: actor.next_result.remote(sweep.sweep_id, trial_id))

        def stop() -> Any:
            acquired.stopped = actor.stop.remote(sweep.sweep_id, trial_id)
            return acquired.stopped

        self.stop = _Call(stop)


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

    def has_lost_its_actor(self) -> bool:
        """Whether the seat's actor is known to have died."""
        if self.broken or self.stopped is None:
            return self.broken
        ready, _ = ray.wait([self.stopped], timeout=0)
        try:
            ray.get(ready)
        except (RayActorError, RayTaskError):
            return True
        return False


class _SeatManager(ResourceManager):  # type: ignore[misc]  # Ray is untyped
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
        broken = acquired_resource.has_lost_its_actor()
        self.sweep.pool.give_back(acquired_resource.seat, broken=broken)

    def get_resource_futures(self) -> list[Any]:
        return self.sweep.pool.pending()

    def update_state(self) -> None:
        self.sweep.pool.poll()

    def clear(self) -> None:
        self._requests = []


class _SeatActors(RayActorManager):  # type: ignore[misc]  # Ray is untyped
    """Ray's manager of trial actors, except that it never kills a member of the pool."""

    def __init__(self, resource_manager: _SeatManager) -> None:
        super().__init__(resource_manager=resource_manager)
        self._is_lost = resource_manager.sweep.is_lost

    def next(self, timeout: float | None = None) -> bool:
        self._resource_manager.update_state()
        started_s = time.monotonic()
        if super().next(timeout=timeout):
            return True
        # With nothing to wait for, Ray does not wait at all: its loop would spin.
        time.sleep(max(0.0, _IDLE_S - (time.monotonic() - started_s)))
        return False

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
        lost = isinstance(exception, RayTaskError) and self._is_lost(exception.cause)
        if lost or isinstance(exception, RayActorError):
            self._mark_broken(tracked_actor_task._tracked_actor)
        super()._actor_task_failed(tracked_actor_task, exception)

    def cleanup(self) -> None:
        for _, acquired in self._live_actors_to_ray_actors_resources.values():
            self._resource_manager.free_resources(acquired)
        self._resource_manager.clear()
        self.__init__(resource_manager=self._resource_manager)  # type: ignore[misc]  # as Ray does


@contextlib.contextmanager
def pooled(sweep: PooledSweep) -> Iterator[None]:
    """Inside, ``Tuner.fit`` runs its trials on the sweep's pool."""
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
            self._actor_manager = _SeatActors(resource_manager=_SeatManager(sweep))

        def _process_trial_failure(self, trial: Any, exception: Any) -> None:
            """Try a killed trial again, as often as the sweep allows; a wrong one never."""
            if not sweep.may_retry(trial.trial_id, exception):
                trial.max_failures = 0
            super()._process_trial_failure(trial, exception)

    original = ray.tune.tune.TuneController
    ray.tune.tune.TuneController = PooledController
    try:
        yield
    finally:
        ray.tune.tune.TuneController = original
