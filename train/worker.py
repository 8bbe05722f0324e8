"""One rank of a run under Ray Train: what surrounds the training loop in its process.

Promises: every rank gets the same answer to "leave?"; a rank that has saved and left neither
returns (that would finish the run) nor raises (that would be a failure), but waits until the
controller ends it; an error leaves here only in a form that can be read everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ebbtide.platform import log
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.meter import Meter, Owner
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import TrainConfig
from ebbtide.train.desk import find_desk
from ebbtide.train.events import Checkpoint, Event, StateDigest, Step, Validation
from ebbtide.train.failures import UserCrash, portable

logger = logging.getLogger(__name__)

_LEAVE_POLL_S = 0.25


@dataclass(frozen=True)
class RankSpec:
    """What the driver hands to every rank. ``environment`` may hold secrets: it is not shown."""

    config: TrainConfig
    working_dir: str
    environment: Mapping[str, str] = field(repr=False)


def train_function(spec: RankSpec) -> Callable[[], None]:
    """The function that Ray Train runs on every rank; the process group is up."""

    def train() -> None:
        try:
            run_rank(spec)
        except Exception as error:
            sent = portable(error)
            if isinstance(sent, UserCrash):
                logger.error("this rank has failed", exc_info=True)
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
    log.bind(attempt=attempt)
    device = get_device()
    with LedgerWriter(open_storage(spec.config.run_uri), name=f"rank{rank}") as ledger:
        meter = Meter(SystemClock(), ledger.recorder(node, attempt))
        with contextlib.closing(RaySurroundings(desk, attempt, meter, device)) as surroundings:
            outcome = run_generation(spec.config, attempt, surroundings, device, skip=skip)
        if outcome.status == "left":
            ledger.flush()
            if rank == 0:
                ray.get(desk.left.remote(attempt, outcome.step))
            _wait_for_the_end(meter)


def _settle(spec: RankSpec) -> None:
    """Make this process like the driver's: environment, working directory, logging."""
    os.environ.update(spec.environment)
    if os.path.isdir(spec.working_dir):
        os.chdir(spec.working_dir)
    first = os.environ.get("RANK", "0") == "0"
    log.configure(logging.INFO if first else logging.WARNING)


def _wait_for_the_end(meter: Meter) -> NoReturn:
    with meter.measure(Owner.RESTART):
        while True:
            time.sleep(3600.0)


class RaySurroundings:
    """The loop's world (:class:`ebbtide.train.loop.Surroundings`) on a rank under Ray."""

    def __init__(self, desk: Any, attempt: int, meter: Meter, device: Any) -> None:
        import torch.distributed as dist

        self._meter, self._attempt, self._device = meter, attempt, device
        self._first, self._alone = dist.get_rank() == 0, dist.get_world_size() == 1
        self._desk = desk
        self._watch = LeaveWatch(lambda: _ask(desk, attempt)) if self._first else None

    def close(self) -> None:
        """No more is asked of the desk."""
        if self._watch is not None:
            self._watch.close()

    @property
    def meter(self) -> Meter:
        return self._meter

    def should_leave(self, step: int) -> str | None:
        import torch
        import torch.distributed as dist

        reason = self._watch.reason if self._watch is not None else None
        if self._alone:
            return reason
        flag = torch.tensor(reason is not None, dtype=torch.uint8, device=self._device)
        dist.broadcast(flag, src=0)
        if not flag:
            return None
        message = [reason]
        dist.broadcast_object_list(message, src=0)
        return message[0]

    def on_step(self, result: Any) -> None:
        self._post(
            lambda: Step(
                time_s=time.time(),
                attempt=self._attempt,
                step=result.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens=result.tokens,
                epoch=result.epoch,
                samples=samples_digest(result.sample_ids),
                seconds={owner.value: spent for owner, spent in result.seconds.items()},
            )
        )

        if result.digests is not None:
            self._post(
                lambda: StateDigest(
                    time_s=time.time(),
                    attempt=self._attempt,
                    step=result.step,
                    tensors=dict(result.digests),
                )
            )

    def on_validation(self, step: int, loss: float) -> None:
        self._post(
            lambda: Validation(time_s=time.time(), attempt=self._attempt, step=step, loss=loss)
        )

    def on_checkpoint(self, info: Any, took_s: float) -> None:
        self._post(
            lambda: Checkpoint(
                time_s=time.time(),
                attempt=self._attempt,
                step=info.step,
                uri=info.uri,
                took_s=took_s,
            )
        )

    def _post(self, event: Callable[[], Event]) -> None:
        if self._first:
            self._desk.post.remote(event())


class LeaveWatch:
    """Asks for a reason to leave in the background, so that no step waits for the answer."""

    def __init__(self, ask: Callable[[], str | None], interval_s: float = _LEAVE_POLL_S) -> None:
        self.reason: str | None = None
        self._ask, self._interval_s = ask, interval_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbtide-leave", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._thread.join(1.0)  # a rank that has failed does not wait for an answer

    def _run(self) -> None:
        while self.reason is None and not self._closed.wait(self._interval_s):
            self.reason = self._ask()


def _ask(desk: Any, attempt: int) -> str | None:
    import ray
    import ray.exceptions

    try:
        answer: str | None = ray.get(desk.reason_to_leave.remote(attempt), timeout=5.0)
    except ray.exceptions.RayError as error:  # the driver is gone, and this process soon is
        logger.warning("the run's desk does not answer: %s", error)
        return None
    return answer


def samples_digest(sample_ids: Sequence[int]) -> str:
    """A digest of the sample ids of a step, in order."""
    return hashlib.sha256(array("q", sample_ids).tobytes()).hexdigest()[:16]
