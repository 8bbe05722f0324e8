"""One rank of a run under Ray Train: what surrounds the training loop in its process.

Promises: every rank gets the same answer to "leave?"; a rank that has saved and left neither
returns (that would finish the run) nor fails, but waits until the controller ends it, or ends by
itself where the run is to hold no node; an error leaves here only in a form that can be read
everywhere.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ebbtide.platform import log
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.meter import Meter, Owner
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import TrainConfig
from ebbtide.train.desk import find_desk
from ebbtide.train.failures import Released, UserCrash, portable
from ebbtide.train.surroundings import RaySurroundings
from ebbtide.train.watchdog import Watchdog

logger = logging.getLogger(__name__)

_HELD_POLL_S = 1.0


@dataclass(frozen=True)
class RankSpec:
    """What the driver hands to every rank. ``environment`` may hold secrets: it is not shown."""

    config: TrainConfig
    working_dir: str
    environment: Mapping[str, str] = field(repr=False)


def train_function(spec: RankSpec) -> Callable[[], None]:
    """The function that Ray Train runs on every rank; the process group is up."""

    def train() -> None:
        from ebbtide.platform.ray_seam.output import mute_training_errors

        try:
            run_rank(spec)
        except Exception as error:
            sent = portable(error)
            if isinstance(sent, UserCrash):
                logger.error("this rank has failed", exc_info=True)
            mute_training_errors()  # a lost peer is told once, by the driver
            raise sent from None

    return train


def run_rank(spec: RankSpec) -> None:
    """Run this rank of a generation to the run's end, or until the process is ended."""
    _settle(spec)
    import ray
    import torch.distributed as dist
    from ray.train.torch import get_device

    from ebbtide.train.agree import from_first
    from ebbtide.train.loop import run_generation

    context = ray.get_runtime_context()
    rank, node = dist.get_rank(), context.get_node_id()
    log.bind(run=spec.config.name, rank=rank)
    desk = find_desk(spec.config.run_uri)
    nodes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, node)
    environment = context.get_runtime_env_string()
    attempt = from_first(lambda: int(ray.get(desk.begin.remote(nodes, environment))))
    skip = from_first(lambda: list(ray.get(desk.skipped.remote())))
    interruptions = from_first(lambda: ray.get(desk.interruptions.remote()))
    log.bind(attempt=attempt)
    device = get_device()
    with LedgerWriter(open_storage(spec.config.run_uri), name=f"rank{rank}") as ledger:
        meter = Meter(SystemClock(), ledger.recorder(node, attempt))
        with (
            Watchdog(f"rank {rank}") as watchdog,
            contextlib.closing(
                RaySurroundings(desk, attempt, meter, nodes, watchdog)
            ) as surroundings,
        ):
            outcome = run_generation(
                spec.config,
                attempt,
                surroundings,
                device,
                skip=skip,
                nodes=nodes,
                interruptions=interruptions,
            )
        if outcome.status == "left":
            ledger.flush()
            if rank == 0:
                ray.get(desk.left.remote(attempt, outcome.step))
            _wait_for_the_end(meter, desk)


def _settle(spec: RankSpec) -> None:
    """Make this process like the driver's: environment, working directory, logging."""
    os.environ.update(spec.environment)
    if os.path.isdir(spec.working_dir):
        os.chdir(spec.working_dir)
    first = os.environ.get("RANK", "0") == "0"
    log.configure(logging.INFO if first else logging.WARNING)


def _wait_for_the_end(meter: Meter, desk: Any) -> NoReturn:
    import ray

    with meter.measure(Owner.RESTART):
        while not ray.get(desk.is_held.remote()):
            time.sleep(_HELD_POLL_S)
    raise Released("the run has saved and waits")
