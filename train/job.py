"""A training job: from a configuration to a finished run, on whatever Ray cluster there is.

Promises: everything that can be seen to be wrong is said before a worker starts; a run that is
submitted again under its name goes on from its newest committed checkpoint, and a finished one
says so at once; a driver that ends, in whatever way, leaves no worker behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

from ebbtide.platform import records
from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import (
    BudgetError,
    ClusterError,
    EbbtideError,
    StorageError,
    TrainingError,
)
from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.price_feed import PriceFeed
from ebbtide.platform.scratch import scratch_folder
from ebbtide.platform.storage import Storage, open_storage, probe
from ebbtide.train import admission
from ebbtide.train.admission import resources
from ebbtide.train.bookkeeping import Bookkeeping
from ebbtide.train.config import TrainConfig
from ebbtide.train.dataset import index_digest
from ebbtide.train.events import Event, EventLog, Finished, Started, read_events
from ebbtide.train.history import History
from ebbtide.train.last_events import unwritten
from ebbtide.train.manifest import newest, read_manifest, read_train_config
from ebbtide.train.market import require_market_prices, supervised
from ebbtide.train.ray_connection import connected
from ebbtide.train.resume import require_same_run
from ebbtide.train.run_lock import RunLock
from ebbtide.train.spending import Guard
from ebbtide.train.telemetry import AccountWatch, Telemetry

if TYPE_CHECKING:
    from ebbtide.train.driver import Driver, Progress

logger = logging.getLogger(__name__)

_PROCESS_GROUP_TIMEOUT_S = 600
_PASSED_ON = "AWS_"
"""Variables of the driver that its workers get: the standard ones of storage."""


@dataclass(frozen=True)
class RunResult:
    """A finished run. ``attempts`` and the rest count from the run's first start.

    ``loss_first`` and ``loss`` are of the first and last step; ``usd`` is this driver's cost, None
    if no node's price is known, too low if ``usd_partial``.
    """

    name: str
    run_uri: str
    step: int
    attempts: int
    world_sizes: list[int]
    loss_first: float | None
    loss: float | None
    validation_loss: float | None
    steps_lost: int
    usd: Decimal | None
    usd_partial: bool
    was_finished: bool


def train(
    config: TrainConfig,
    *,
    address: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
) -> RunResult:
    """Train to the end, or raise the error of ebbtide's tree that says why not.

    Runs on the Ray cluster at ``address`` (``host:port`` or ``auto``), else at ``RAY_ADDRESS``
    (set in Ray jobs), else on a Ray of its own on this machine. ``on_progress`` is called in this
    thread about twice a second while steps are made.
    """
    clock = clock or SystemClock()
    feed = PriceFeed(config.cost.catalogue, config.cost.live)
    run = open_storage(config.run_uri)
    probe(run)
    with RunLock(run) as lock:
        events, start = read_events(run), newest(run)
        recovered = unwritten(start, events)
        events += recovered
        history = History(events)
        if start is not None and start.step >= config.steps:
            _require_same_run(config, start.uri)
            logger.info("%s is finished already, at step %d", config.name, start.step)
            return _result(config, history, start.step, None, was_finished=True)
        per_epoch = Fraction(_check(config), config.batch.global_sequences)
        first_step = start.step if start is not None else 0
        books = Bookkeeping(config.cost, feed, clock.time(), first_step)
        spent = admission.earlier(run, events, clock.time())
        guard = Guard(config.budget, config.steps, clock.time(), spent, first_step, per_epoch)
        admission.admit(config, guard, spent, clock.time())
        require_market_prices(config, feed)
        with feed, admission.share(config, spent, books, clock), connected(address):
            admission.require_prices(config, feed)
            with AccountWatch(run, clock) as watch:
                seen = Telemetry(config.name, watch, clock, events)
                with _open(
                    config, run, history, recovered, books, guard, clock, on_progress, seen
                ) as driver:
                    _fit(config, driver, lock, first_step)
    return _result(config, history, config.steps, driver, was_finished=False)


def _require_same_run(config: TrainConfig, checkpoint_uri: str) -> None:
    """Raise CheckpointError if the finished run at that checkpoint is not the job's."""
    checkpoint = open_storage(checkpoint_uri)
    description = read_manifest(checkpoint)
    saved = read_train_config(checkpoint, description)
    try:
        data = index_digest(config.data.uri)
    except StorageError:  # it is of no more use, and may be gone
        data = description.dataset_sha256
    require_same_run(checkpoint_uri, saved, description.dataset_sha256, config, data)


def _check(config: TrainConfig) -> int:
    from ebbtide.train import preflight  # late: it imports torch

    return preflight.check(config)


def _result(
    config: TrainConfig, history: History, step: int, driver: Driver | None, was_finished: bool
) -> RunResult:
    steps = sorted(history.kept)
    progress = driver.progress() if driver is not None and history.last is not None else None
    return RunResult(
        name=config.name,
        run_uri=config.run_uri,
        step=step,
        attempts=len(history.attempts),
        world_sizes=history.world_sizes,
        loss_first=history.kept[steps[0]].loss if steps else None,
        loss=history.kept[steps[-1]].loss if steps else None,
        validation_loss=history.validation_loss,
        steps_lost=history.steps_lost(),
        usd=progress.usd if progress is not None else None,
        usd_partial=progress.usd_partial if progress is not None else False,
        was_finished=was_finished,
    )


@contextlib.contextmanager
def _open(
    config: TrainConfig,
    run: Storage,
    history: History,
    recovered: Sequence[Event],
    books: Bookkeeping,
    guard: Guard,
    clock: Clock,
    on_progress: Callable[[Progress], None] | None,
    telemetry: Telemetry,
) -> Iterator[Driver]:
    """The run's desk, events and ledger; they say how it ended, whatever happens in between.

    ``recovered`` are in the history, and not yet in the log.
    """
    from ebbtide.train.desk import open_desk
    from ebbtide.train.driver import Driver

    past = history.skipped, history.placed, history.interruptions
    desk = open_desk(config.run_uri, history.next_attempt, *past)
    started = Started(time_s=clock.time(), steps=config.steps)
    with (
        EventLog(run, session=history.sessions) as log,
        LedgerWriter(run, clock, name="driver") as ledger,
    ):
        history.add([started])
        log.write([*recovered, started])
        ledger.write(records.Started(time_s=clock.time()))
        driver = Driver(
            config, desk, log, ledger, books, guard, history, clock, on_progress, telemetry
        )
        status, message = "interrupted", None
        try:
            yield driver
            status = "finished"
        except EbbtideError as error:
            status = "stopped" if isinstance(error, BudgetError) else "failed"
            message = str(error)
            raise
        finally:
            now_s, last = clock.time(), history.last
            step = last.step if last is not None else 0
            log.write([Finished(time_s=now_s, status=status, step=step, message=message)])
            ledger.write(records.Finished(time_s=now_s, status=status))
            books.end(now_s)


def _fit(config: TrainConfig, driver: Driver, lock: RunLock, first_step: int) -> None:
    from ray.exceptions import RayError
    from ray.train import LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError

    from ebbtide.platform.ray_seam import output
    from ebbtide.platform.ray_seam.train import ElasticTrainer
    from ebbtide.platform.ray_seam.train_policies import rank_errors
    from ebbtide.platform.ray_seam.workers import (
        HOOK_VARIABLE,
        forget_prepared,
        forked_environment,
    )
    from ebbtide.train.controller import Judge, Scaling
    from ebbtide.train.elastic import Limits
    from ebbtide.train.failures import classify, to_raise
    from ebbtide.train.warm import HOOK, MODULES
    from ebbtide.train.worker import RankSpec, train_function

    workers = config.workers
    limits = Limits(workers.min, workers.max, config.batch.micro_batches, config.steps)
    passed_on = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
    with scratch_folder("train") as folder, supervised(config, first_step) as market_is_well:

        def tick() -> None:
            market_is_well()
            driver.tick()

        trainer = ElasticTrainer(
            train_function(RankSpec(config, os.getcwd(), passed_on)),
            scaling=Scaling(config.run_uri, limits, config.market is not None),
            judge=Judge(config.run_uri, workers.max_failures, config.on_nan == "skip"),
            tick=lock.watched(tick),
            scaling_config=ScalingConfig(
                num_workers=(workers.min, workers.max),
                use_gpu=workers.gpus > 0,
                resources_per_worker=resources(config),
            ),
            run_config=RunConfig(
                name=config.name,
                storage_path=str(folder),
                worker_runtime_env=forked_environment({HOOK_VARIABLE: HOOK}, MODULES),
                logging_config=LoggingConfig(log_level="WARNING"),
            ),
            process_group_timeout_s=_PROCESS_GROUP_TIMEOUT_S,
        )
        try:
            with output.plain():
                trainer.fit()
            forget_prepared()
        except RayError as error:
            raise ClusterError(f"the connection to the cluster was lost: {error}") from error
        except TrainingFailedError as error:
            forget_prepared()
            errors = rank_errors(error)
            if not errors:
                raise TrainingError(f"training failed: {error}") from error
            raise to_raise(classify(errors, node_is_lost=False)) from error
