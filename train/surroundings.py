"""The training loop's world (:class:`ebbtide.train.loop.Surroundings`) on a rank under Ray.

Promises: every rank gets the same answer to "leave?"; only rank 0 tells the desk, and no step waits
for the desk.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from ebbtide.platform.checksums import sha256
from ebbtide.platform.meter import Meter, Owner
from ebbtide.train.events import (
    Checkpoint,
    CheckpointMissed,
    Event,
    StateDigest,
    Step,
    Straggler,
    Validation,
)
from ebbtide.train.last_events import LastEvents
from ebbtide.train.straggler import StragglerWatch
from ebbtide.train.watchdog import Watchdog

logger = logging.getLogger(__name__)

_LEAVE_POLL_S = 0.25


class RaySurroundings:
    """See the module. ``nodes`` are those of the ranks, in order."""

    def __init__(
        self,
        desk: Any,
        attempt: int,
        meter: Meter,
        nodes: Sequence[str],
        watchdog: Watchdog | None = None,
    ) -> None:
        import torch.distributed as dist

        self._meter, self._attempt, self._nodes = meter, attempt, nodes
        self._stragglers, self._watchdog = StragglerWatch(), watchdog
        self._last_step_s: float | None = None
        self._first, self._alone = dist.get_rank() == 0, dist.get_world_size() == 1
        self._desk, self._told = desk, LastEvents()
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
        from ray.train.torch import get_device

        reason = self._watch.reason if self._watch is not None else None
        if self._alone:
            return reason
        flag = torch.tensor(reason is not None, dtype=torch.uint8, device=get_device())
        with self._meter.measure(Owner.NETWORK_STALL):
            dist.broadcast(flag, src=0)
        if not flag:
            return None
        message = [reason]
        dist.broadcast_object_list(message, src=0)
        return message[0]

    def on_step(self, result: Any) -> None:
        now_s = time.monotonic()
        if self._watchdog is not None and self._last_step_s is not None:
            self._watchdog.step_s = now_s - self._last_step_s
        self._last_step_s = now_s
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

        if self._first and not self._alone:
            for rank, ratio in self._stragglers.add(result.busy_s):
                self._name_straggler(result.step, rank, ratio)

    def _name_straggler(self, step: int, rank: int, ratio: float) -> None:
        from ray.util.metrics import Gauge

        node = self._nodes[rank]
        gauge = Gauge(
            "ebbtide_straggler_ratio",
            "Working time of a straggling rank over the median rank's",
            tag_keys=("rank", "node"),
        )
        gauge.set(ratio, {"rank": str(rank), "node": node})
        self._post(
            lambda: Straggler(
                time_s=time.time(),
                attempt=self._attempt,
                step=step,
                rank=rank,
                node=node,
                ratio=ratio,
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
                size_bytes=info.size_bytes,
            )
        )

    def on_missed(self, missed: Any) -> None:
        self._post(
            lambda: CheckpointMissed(
                time_s=time.time(),
                attempt=self._attempt,
                step=missed.step,
                why=missed.why,
                message=missed.message,
            )
        )

    def _post(self, event: Callable[[], Event]) -> None:
        if self._first:
            told = event()
            self._told.add(told)
            self._desk.post.remote(told)

    def last_events(self, step: int) -> bytes:
        return self._told.until(step)


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
    return sha256(array("q", sample_ids).tobytes())[:16]
