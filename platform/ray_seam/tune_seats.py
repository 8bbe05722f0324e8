"""The seats of a pool where Ray Tune expects resources and actors of its own.

A trial gets a seat, and a handle whose calls go to the seat's actor. What an earlier driver has
heard of a trial is answered from its record, and the trial starts only when more is asked of it.
Promises: every seat that was taken is given back, with word of whether its actor is broken or is
another sweep's now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.air.execution.resources.request import AcquiredResources
from ray.air.execution.resources.resource_manager import ResourceManager
from ray.exceptions import RayActorError, RayTaskError
from ray.train._internal.session import _TrainingResult
from ray.tune.result import TRIAL_INFO


class Seats(Protocol):
    """What the controller asks of a pool. A seat has its actor's handle as ``actor``."""

    def poll(self) -> None: ...
    def any_free(self) -> bool: ...
    def take(self) -> Any | None: ...
    def swap(self, seat: Any, wanted: Any) -> Any: ...
    def give_back(self, seat: Any, *, broken: bool, yielded: bool) -> None: ...
    def pending(self) -> list[Any]: ...


class Past(Protocol):
    """What an earlier driver of the sweep has heard. An answer is a result or an exception."""

    def has_answer(self, trial_id: str) -> bool:
        """Whether what the trial is asked next is on record."""

    def answer(self, trial_id: str) -> Any:
        """Take it off the record."""

    def is_over(self) -> bool:
        """Whether everything has been told."""

    def due(self) -> str | None:
        """The trial that was heard next; None if it is not among those of this driver (yet)."""

    def earliest(self, trial_ids: Collection[str]) -> str | None:
        """The one of these that was heard next; if none was, the order of the rest is given up."""

    def telling(self, trial_id: str) -> AbstractContextManager[None]:
        """While the trial's answer is worked on."""


@dataclass
class PooledSweep:
    """One sweep's use of a pool. Its actors have ``start``, ``next_result``, ``pause``, ``forget``
    and ``stop``; what ``stop`` returns says whether the seat is another sweep's from then on.

    ``request_of`` makes what an actor is asked to run of a trial's id, sampled values and seat.
    ``may_retry`` hears of every failure of a trial, whatever Ray raises for a call to its actor,
    and decides. ``is_lost`` tells the actors' own errors by which a seat is no longer the sweep's.
    ``told`` has the pending answers from ``past`` and the trial they are of, ``paused`` the seat
    that keeps a paused trial's process, ``saved`` the answers to Ray Tune's wish to save one.
    """

    pool: Seats
    sweep_id: str
    request_of: Callable[[str, dict[str, Any], Any], Any]
    may_retry: Callable[[str, BaseException], bool]
    is_lost: Callable[[BaseException], bool]
    past: Past
    told: dict[Any, str] = field(default_factory=dict)
    paused: dict[str, Any] = field(default_factory=dict)
    saved: set[Any] = field(default_factory=set)

    def forget(self, trial_id: str) -> None:
        """End the process of a trial if it is paused."""
        home = self.paused.pop(trial_id, None)
        if home is not None and home.actor is not None:
            home.actor.forget.remote(self.sweep_id, trial_id)


class _Call:
    def __init__(self, submit: Callable[[], Any]) -> None:
        self._submit = submit

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._submit()


class _TrialHandle:
    """Stands where Tune expects the handle of a trial's own actor; the calls go to a seat's.

    A trial that is on record starts only when it is asked for more than that.
    """

    def __init__(self, acquired: _SeatAcquired, config: dict[str, Any]) -> None:
        self._acquired, self._sweep = acquired, acquired.sweep
        self._trial_id = config[TRIAL_INFO].trial_id
        values = {key: value for key, value in config.items() if not key.startswith("__")}
        self._go_home()
        self._request = self._sweep.request_of(self._trial_id, values, self._acquired.seat)
        self._started: Any = None
        self._paused = False
        ready = ray.put(None) if self._sweep.past.has_answer(self._trial_id) else self._start()
        self.__ray_ready__ = _Call(lambda: ready)
        self.get_auto_filled_metrics = _Call(dict)  # asked at the start; the results bring all
        self.train = _Call(self._next_result)
        self.save = _Call(self._pause)
        self.stop = _Call(self._stop)

    def _go_home(self) -> None:
        """Take the seat that keeps the paused trial; if that is busy, start again on this one."""
        home = self._sweep.paused.get(self._trial_id)
        if home is None:
            return
        self._acquired.seat = self._sweep.pool.swap(self._acquired.seat, home)
        if self._acquired.seat is home:
            del self._sweep.paused[self._trial_id]
        else:
            self._sweep.forget(self._trial_id)

    def _start(self) -> Any:
        actor = self._acquired.seat.actor
        self._started = actor.start.remote(self._sweep.sweep_id, self._request)
        return self._started

    def _next_result(self) -> Any:
        past, trial_id = self._sweep.past, self._trial_id
        if past.has_answer(trial_id):
            answer = past.answer(trial_id)
            if isinstance(answer, BaseException):
                answer = RayTaskError("next_result", str(answer), answer)
            told = ray.put(answer)
            self._sweep.told[told] = trial_id
            return told
        if self._started is None:
            self._start()
        return self._acquired.seat.actor.next_result.remote(self._sweep.sweep_id, trial_id)

    def _pause(self) -> Any:
        """Ray Tune saves a trial before it pauses it; here the seat keeps its process instead."""
        self._paused = True
        saved = ray.put(_TrainingResult(checkpoint=None, metrics={}))
        if not self._sweep.past.is_over():
            self._sweep.saved.add(saved)
        return saved

    def _stop(self) -> Any:
        if self._started is None:
            return ray.put(None)
        actor = self._acquired.seat.actor
        if self._paused:
            self._sweep.paused[self._trial_id] = self._acquired.seat
        end = actor.pause if self._paused else actor.stop
        self._acquired.stopped = end.remote(self._sweep.sweep_id, self._trial_id)
        return self._acquired.stopped


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
