"""Validation of a run beside it: every checkpoint that it commits is scored on the pool.

``validation.where: pool`` of a training job. Promises: the training waits for nothing here; what is
scored is in the run's own events, once a step; at the end of the run all that is left is scored.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from types import TracebackType
from uuid import uuid4

import ray
from ray.exceptions import RayActorError, RayError

from ebbtide.platform.errors import ClusterError, EbbtideError
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import EventLog, Validation, read_events
from ebbtide.train.manifest import CheckpointInfo, list_checkpoints
from ebbtide.tune.config import PoolConfig
from ebbtide.tune.failures import failure_of
from ebbtide.tune.pool import Pool
from ebbtide.tune.scoring import CHECKPOINT, TASK
from ebbtide.tune.seat import Seat
from ebbtide.tune.suite import SCORE
from ebbtide.tune.trial import TrialRequest

_log = logging.getLogger(__name__)
_POLL_S, _SEAT_POLL_S = 2.0, 0.2
_TIMEOUT_S = 3600.0
_SESSION = 9000
"""Segments of the run's events sort by it: after those of its drivers."""


class Follower:
    """Follows one run from a thread, in a process that is connected to Ray. A context manager.

    Leaving it waits until the last checkpoint is scored; ``loss`` is the newest score then.
    """

    def __init__(self, config: TrainConfig, pool: PoolConfig | None = None) -> None:
        self._config, self._run = config, open_storage(config.run_uri)
        self._pool = pool or PoolConfig(size=1)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="validation", daemon=True)
        self.loss: float | None = None

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        if kind is None:
            self._thread.join()

    def _follow(self) -> None:
        try:
            known = {event.step for event in read_events(self._run) if event.kind == "validation"}
            with Pool(self._pool) as pool, EventLog(self._run, _SESSION) as log:
                while True:
                    is_over = self._ended.is_set()
                    for found in reversed(list_checkpoints(self._run)):  # lowest step first
                        if found.state == "complete" and found.step not in known:
                            known.add(found.step)
                            self._score(pool, log, found)
                    if is_over:
                        return
                    self._ended.wait(_POLL_S)
        except EbbtideError as error:
            _log.warning("the run is not validated any more: %s", error)

    def _score(self, pool: Pool, log: EventLog, found: CheckpointInfo) -> None:
        """Score one checkpoint as soon as there is an evaluator, however long that takes."""
        seat = self._seat(pool)
        request = TrialRequest(
            trial_id=uuid4().hex,
            function="ebbtide.tune.scoring:score",
            base={"base": None, "tasks": {"validation": {}}},
            values={CHECKPOINT: found.uri, TASK: "validation"},
            metric=SCORE,
            timeout_s=_TIMEOUT_S,
            environment={k: v for k, v in os.environ.items() if k.startswith("AWS_")},
            is_user=True,
        )
        try:
            result = ray.get(seat.actor.begin.remote(pool.lease.sweep_id, request))
        except RayError as error:
            _log.warning("step %d could not be validated: %s", found.step, failure_of(error))
            pool.give_back(seat, broken=isinstance(error, RayActorError))
            return
        yielded = ray.get(seat.actor.stop.remote(pool.lease.sweep_id, request.trial_id))
        pool.give_back(seat, broken=False, yielded=yielded)
        self.loss = result[SCORE]
        _log.info("step %d: validation loss %.4f", found.step, self.loss)
        attempt = next((e.attempt for e in read_events(self._run) if e.kind == "generation"), 0)
        log.write(
            [Validation(time_s=time.time(), attempt=attempt, step=found.step, loss=self.loss)]
        )

    def _seat(self, pool: Pool) -> Seat:
        """An evaluator. Raises ClusterError if there is none for long after the run's end."""
        waited_s = 0.0
        while (seat := pool.take()) is None:
            time.sleep(_SEAT_POLL_S)
            waited_s += _SEAT_POLL_S if self._ended.is_set() else 0.0
            if waited_s > self._pool.start_timeout_s:
                raise ClusterError(f"no evaluator could be had for {waited_s:.0f} s")
            pool.poll()
        return seat
