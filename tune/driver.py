"""One process's part of a sweep: all of it, or what an earlier one has left.

Ray Tune proposes, schedules and stops; the pool's evaluators run the trials; the journal has what
was heard. Promises: what was heard before is told again and not run; a driver that ends in any way
but a kill frees the evaluators and says what it has spent.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ebbtide.platform.checksums import sha256
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.errors import TuneError
from ebbtide.platform.storage import Storage
from ebbtide.train.ray_connection import connected
from ebbtide.tune import journal, output
from ebbtide.tune.journal import Journal
from ebbtide.tune.past import Past, with_memories
from ebbtide.tune.recorder import Recorder
from ebbtide.tune.results import SweepResult, SweepStatus, Trial
from ebbtide.tune.space import Sweep
from ebbtide.tune.spending import Limits, Spending
from ebbtide.tune.trial import TrialRequest

if TYPE_CHECKING:
    from ebbtide.tune.pool import Pool, Seat
    from ebbtide.tune.prices import SeatPrices

_log = logging.getLogger(__name__)
TRAIN = "ebbtide.tune.trial:train"
_WHERE = {"pool", "concurrency", "max_seconds", "max_dollars", "cost", "trial_timeout_s"}


def limits(sweep: Sweep) -> Limits:
    return Limits(sweep.config.max_seconds, sweep.config.max_dollars)


def spec(sweep: Sweep) -> dict[str, Any]:
    """What makes two sweeps the same: all but where they run, and for how long."""
    config = sweep.config.model_dump(mode="json", exclude=_WHERE)
    base = None if sweep.base is None else sweep.base.model_dump(mode="json")
    return {"sweep": config, "base": base}


class Driver:
    """One process's part of a sweep: all of it, or what an earlier one has left."""

    def __init__(
        self,
        sweep: Sweep,
        storage: Storage,
        function: str | None,
        on_trial: Callable[[Trial], None] | None,
    ) -> None:
        self._clock = SystemClock()
        self._called_at_s = self._clock.time()
        self._sweep, self._storage = sweep, storage
        self._function = function or sweep.config.function or TRAIN
        self._on_trial = on_trial
        self._record = journal.read(storage)
        self._key = sha256(json.dumps([sweep.uri, spec(sweep)]).encode())[:16]
        self._base = sweep.fixed
        self._environment = {k: text for k, text in os.environ.items() if k.startswith("AWS_")}
        self._past = Past()
        self._nodes: dict[str, str | None] = {}
        self._prices: SeatPrices | None = None
        self._recorder: Recorder | None = None
        self._limit: str | None = None
        self._warm_s = 0.0
        self._spending = Spending(
            self._clock, limits(sweep), self._record.seconds, self._record.usd
        )

    def run(self, address: str | None) -> SweepResult:
        status: SweepStatus = "interrupted"
        diary = Journal(self._storage, self._record.attempts + 1, self._clock)
        try:
            self._fit(address, diary)
            status = "finished" if self._limit is None else "budget"
        finally:
            diary.write("spent", usd=str(self._spending.own_usd))
            diary.close()
            result = self._result(status)
            if result.trials:
                output.write(self._storage, result)
        return result

    def _result(self, status: SweepStatus) -> SweepResult:
        trials = self._recorder.trials if self._recorder is not None else ()
        starts_s = [trial.started_at_s - self._called_at_s for trial in trials]
        first_s = min((start_s for start_s in starts_s if start_s >= 0), default=None)
        return SweepResult(
            name=self._sweep.name,
            uri=self._sweep.uri,
            metric=self._sweep.config.metric,
            mode=self._sweep.config.mode,
            status=status,
            trials=trials,
            seconds=self._spending.seconds,
            first_trial_s=first_s,
            limit=self._limit,
            usd=self._spending.usd,
            partial=self._spending.partial,
            saved_s=max(0.0, self._warm_s * sum(trial.tries for trial in trials) - (first_s or 0)),
        )

    def _fit(self, address: str | None, diary: Journal) -> None:
        """Connect, take the evaluators, and let Ray Tune run to its end."""
        from ebbtide.tune.pool import Pool

        config = self._sweep.config
        seats = config.pool.model_copy(update={"size": config.concurrency or config.pool.size})
        with connected(address), Pool(seats) as pool, tempfile.TemporaryDirectory() as scratch:
            # Importing Ray Tune takes about as long as joining the pool, so both go on at once.
            import ray.tune

            from ebbtide.platform.ray_seam.tune import pooled
            from ebbtide.platform.ray_seam.tune_seats import PooledSweep
            from ebbtide.tune import tuner
            from ebbtide.tune.failures import is_lost

            self._recorder = self._remember(diary)
            pooled_sweep = PooledSweep(
                pool, pool.lease.sweep_id, self._request, self._may_retry, is_lost, self._past
            )
            with pooled(pooled_sweep):
                made = tuner.make_tuner(
                    config,
                    name=self._sweep.name,
                    max_steps=self._sweep.max_steps,
                    scratch=scratch,
                    audience=self._recorder,
                    is_spent=self._charging(pool, diary),
                )
                pool.wait()
                self._spending.tick([])  # from here on
                if config.max_dollars is not None and self._prices is not None:
                    for node_id in pool.held_nodes():  # an unknown price is refused
                        self._prices.of(node_id)
                try:
                    made.fit()
                except ray.tune.TuneError as error:
                    raise TuneError(f"Ray Tune failed: {error}") from error
            self._warm_s = max(seat.warm_s for seat in pool.seats)
        if self._limit is not None:
            self._recorder.cut(f"the sweep's {self._limit}")

    def _charging(self, pool: Pool, diary: Journal) -> Callable[[], bool]:
        """Charges for the seats held since the last call; whether the sweep may spend no more."""
        from ebbtide.tune.prices import SeatPrices

        prices = self._prices = SeatPrices(self._sweep.cost, self._sweep.config)

        def is_spent() -> bool:
            limit = self._spending.tick(prices.of(node_id) for node_id in pool.held_nodes())
            if self._spending.is_news():
                diary.write("spent", usd=str(self._spending.own_usd))
            if limit is not None and self._limit is None:
                _log.warning("%s; the sweep ends with what it has", limit)
                self._limit = limit
            return limit is not None

        return is_spent

    def _usd_per_hour(self, trial_id: str) -> Decimal | None:
        """What the trial's seat costs."""
        node_id = self._nodes.get(trial_id)
        return None if self._prices is None or node_id is None else self._prices.of(node_id)

    def _remember(self, diary: Journal) -> Recorder:
        """The recorder, with what earlier drivers and the evaluators know of the sweep."""
        if self._record.attempts:
            from ebbtide.tune.members import recall

            memories = recall(self._sweep.config.pool.namespace, self._key)
            events = with_memories(self._record.events, memories)
            for event in events[len(self._record.events) :]:
                diary.write(**event)
            self._past = Past(events)
            _log.info(
                "continuing the sweep %s: %d trials are finished and will not run again",
                self._sweep.name,
                self._past.num_finished,
            )
        return Recorder(
            self._sweep.config,
            self._sweep.max_steps,
            self._clock,
            self._on_trial,
            past=self._past,
            journal=diary,
            usd_per_hour=self._usd_per_hour,
        )

    def _request(self, trial_id: str, values: dict[str, Any], seat: Seat) -> TrialRequest:
        from ebbtide.tune.tuner import values_of

        recorder, config = self._recorder, self._sweep.config
        assert recorder is not None
        values = values_of(config, values)
        self._nodes[trial_id] = seat.node_id
        recorder.started(trial_id, values)
        return TrialRequest(
            trial_id=trial_id,
            function=self._function,
            base=self._base,
            values=values,
            metric=config.metric,
            timeout_s=config.trial_timeout_s,
            cwd=os.getcwd(),
            environment=self._environment,
            is_user=self._function == config.function,
            sweep=self._key,
            number=recorder.number(trial_id),
            failures=recorder.failures(trial_id),
            skip=recorder.heard(trial_id) + self._past.to_skip(trial_id),
        )

    def _may_retry(self, trial_id: str, error: BaseException) -> bool:
        from ebbtide.tune.failures import failure_of

        assert self._recorder is not None
        failure = failure_of(error)
        self._recorder.failed(trial_id, failure)
        return failure.may_retry
