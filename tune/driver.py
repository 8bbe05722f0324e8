"""One process's part of a sweep: all of it, or what an earlier one has left.

Ray Tune proposes, schedules and stops; the pool's evaluators run the trials; the journal has what
was heard. Promises: what was heard before is told again and not run; a driver that ends in any way
but a kill frees the evaluators and says what it has spent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from ebbtide.platform.checksums import sha256
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.errors import TuneError
from ebbtide.platform.ray_seam.tune_import import importing_tune
from ebbtide.platform.storage import Storage
from ebbtide.train.ray_connection import connected
from ebbtide.tune import journal, output
from ebbtide.tune.books import Books
from ebbtide.tune.journal import Journal
from ebbtide.tune.past import Past, with_memories
from ebbtide.tune.recorder import Recorder
from ebbtide.tune.results import SweepResult, SweepStatus, Trial
from ebbtide.tune.space import Sweep
from ebbtide.tune.spending import Limits, Spending
from ebbtide.tune.trial import TrialRequest

if TYPE_CHECKING:
    from ebbtide.tune.pool import Pool
    from ebbtide.tune.prices import SeatPrices
    from ebbtide.tune.seat import Seat

_log = logging.getLogger(__name__)
_TUNER = "ebbtide.tune.tuner"
TRAIN = "ebbtide.tune.trial:train"
_WHERE = {
    "pool",
    "concurrency",
    "max_seconds",
    "max_dollars",
    "cost",
    "trial_timeout_s",
    "trial_memory_gb",
}


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
        self._recorder: Recorder | None = None
        self._limit: str | None = None
        self._warm_s = self._fit_s = 0.0
        self._start_owed_s: float | None = None
        self._books = Books(storage, self._clock, self._record.attempts + 1)
        self._spending = Spending(
            self._clock, limits(sweep), self._record.seconds, self._record.usd
        )

    def run(self, address: str | None) -> SweepResult:
        """The outcome; what an interrupted sweep has by then is written at once."""
        diary = Journal(self._storage, self._record.attempts + 1, self._clock)
        try:
            with self._books:
                self._fit(address, diary)
                status: SweepStatus = "finished" if self._limit is None else "budget"
                self._books.status = status
        except BaseException:
            result = self._close(diary, "interrupted")
            if result.trials:
                output.write(self._storage, result)
            raise
        return self._close(diary, status)

    def _close(self, diary: Journal, status: SweepStatus) -> SweepResult:
        diary.write("spent", usd=str(self._spending.own_usd))
        diary.close()
        return self._result(status)

    def _result(self, status: SweepStatus) -> SweepResult:
        trials = self._recorder.trials if self._recorder is not None else ()
        first_s = self._first_start_s(trials)
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
            fit_s=self._fit_s,
        )

    def _first_start_s(self, trials: Sequence[Trial]) -> float | None:
        """Seconds from the call to the start of the first trial of this driver."""
        starts_s = [trial.started_at_s - self._called_at_s for trial in trials]
        return min((start_s for start_s in starts_s if start_s >= 0), default=None)

    def _trial_ended(self, trial: Trial) -> None:
        """Book a trial. What it took to get the pool ready is no start-up that was saved."""
        if self._start_owed_s is None:
            self._start_owed_s = self._first_start_s(self._heard_by.trials) or 0.0
        gained_s = self._warm_s * trial.tries
        paid_s = min(gained_s, self._start_owed_s)
        self._start_owed_s -= paid_s
        self._books.ended(trial.number, trial.status, trial.seconds, trial.usd, gained_s - paid_s)
        if self._on_trial is not None:
            self._on_trial(trial)

    def _fit(self, address: str | None, diary: Journal) -> None:
        """Connect, take the evaluators, and let Ray Tune run to its end."""
        config = self._sweep.config
        seats = config.pool.model_copy(update={"size": config.concurrency or config.pool.size})
        # Importing Ray Tune takes about as long as the way to the pool, so both go on at once.
        with contextlib.ExitStack() as stack:
            imported = stack.enter_context(importing_tune(_TUNER))
            from ebbtide.tune.pool import Pool

            stack.enter_context(connected(address))
            pool = stack.enter_context(Pool(seats))
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            pool.wait()
            imported()
            import ray.tune

            from ebbtide.platform.ray_seam.tune import pooled
            from ebbtide.platform.ray_seam.tune_sweep import PooledSweep
            from ebbtide.tune import tuner

            self._recorder = self._remember(diary)
            pool.on_use = lambda seat, seconds: self._books.ran(seat.name, seconds)
            shares = config.scheduler == "pbt"
            with pooled(PooledSweep(pool, pool.lease.sweep_id, self, self._past, shares)):
                made = tuner.make_tuner(
                    config,
                    name=self._sweep.name,
                    max_steps=self._sweep.max_steps,
                    scratch=scratch,
                    audience=self._recorder,
                    is_spent=self._charging(pool, diary),
                )
                self._spending.tick([])  # from here on
                if config.max_dollars is not None:
                    for node_id in pool.held_nodes().values():  # an unknown price is refused
                        self._prices.of(node_id)
                began_s = self._clock.monotonic()
                try:
                    made.fit()
                except ray.tune.TuneError as error:
                    raise TuneError(f"Ray Tune failed: {error}") from error
                finally:
                    self._fit_s = self._clock.monotonic() - began_s
        if self._limit is not None:
            self._recorder.cut(f"the sweep's {self._limit}")

    def _charging(self, pool: Pool, diary: Journal) -> Callable[[], bool]:
        """Charges for the seats held since the last call; whether the sweep may spend no more."""

        def is_spent() -> bool:
            prices = self._prices
            held = {name: prices.terms(node_id) for name, node_id in pool.held_nodes().items()}
            limit = self._spending.tick(terms.usd_per_hour for terms in held.values())
            self._books.hold(held)
            self._warm_s = max(seat.warm_s for seat in pool.seats)
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
        return None if node_id is None else self._prices.of(node_id)

    @functools.cached_property
    def _prices(self) -> SeatPrices:
        from ebbtide.tune.prices import SeatPrices  # the first trial need not wait for it

        return SeatPrices(self._sweep.cost, self._sweep.config)

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
            self._trial_ended,
            past=self._past,
            journal=diary,
            usd_per_hour=self._usd_per_hour,
        )

    # What is asked while the trials run; see PooledSweep.

    def request(self, trial_id: str, values: dict[str, Any], seat: Seat) -> TrialRequest:
        from ebbtide.tune.tuner import values_of

        recorder, config = self._heard_by, self._sweep.config
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
            memory_bytes=self._memory_bytes,
            cwd=os.getcwd(),
            environment=self._environment,
            is_user=self._function == config.function,
            sweep=self._key,
            number=recorder.number(trial_id),
            failures=recorder.beginnings(trial_id),
            skip=recorder.heard(trial_id) + self._past.to_skip(trial_id),
        )

    def may_retry(self, trial_id: str, error: BaseException) -> bool:
        from ebbtide.tune.failures import failure_of

        failure = failure_of(error)
        self._heard_by.failed(trial_id, failure)
        return failure.may_retry

    def is_lost(self, error: BaseException) -> bool:
        from ebbtide.tune.failures import is_lost

        return is_lost(error)

    def heard(self, trial_id: str) -> int:
        return self._heard_by.heard(trial_id)

    def took_over(self, trial_id: str, values: dict[str, Any], source: str, step: Any) -> None:
        from ebbtide.tune.tuner import values_of

        self._heard_by.took_over(trial_id, values_of(self._sweep.config, values), source, step)

    def goes_on(self, trial_id: str, step: Any) -> None:
        self._heard_by.goes_on(trial_id, step)

    @property
    def _memory_bytes(self) -> int | None:
        limit_gb = self._sweep.config.trial_memory_gb
        return None if limit_gb is None else round(limit_gb * 1e9)

    @property
    def _heard_by(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder
