"""An endpoint's ledger: its workers' time at their prices, and the tokens of every key.

A worker is a node of the ledger from its first beat to its last, computing from one beat to the
next (a second, or two at rest) if it has had requests there, idle if none; what a key's requests
had is added up to one record for each flush.
Promises: node time and tokens are those of ``/metrics``; a router that takes over continues its
predecessor's books without a gap. With a router that is killed go the tokens of the requests it was
at work on, which break, and of those that ended in the last 15 s (:data:`FLUSH_S` and the ledger's
own interval), but no node time. At an ordinary end requests at work are booked as far as they have
come. What was refused (4xx) is no request. No clock of its own: callers give both times. One event
loop.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Protocol

from ebbtide.platform.meter import Owner
from ebbtide.platform.prices import Market
from ebbtide.platform.records import NodeDown, NodeUp, Record, Served
from ebbtide.serve.config import Role
from ebbtide.serve.fleet import GIVEN_UP_S, Beat
from ebbtide.serve.stages import Cost, StageName

_REMEMBERED = 256
FLUSH_S = 5.0
"""How often what keys had is written, if they had anything."""


def served(key: str, cost: Cost, now_s: float) -> Served:
    """What one request had."""
    seconds: dict[StageName, float] = defaultdict(float)
    for stage in cost.stages:
        seconds[stage.name] += max(0.0, stage.seconds)
    return Served(
        time_s=now_s,
        key=key,
        requests=1,
        prompt_tokens=cost.num_prompt_tokens,
        output_tokens=cost.num_output_tokens,
        queue_s=seconds["queue"],
        prefill_s=seconds["prefill"],
        transfer_s=seconds["transfer"],
        decode_s=seconds["decode"],
    )


class Writer(Protocol):
    """Of the ledger: :class:`ebbtide.platform.ledger.LedgerWriter`."""

    def write(self, record: Record, /) -> None: ...

    def recorder(self, node_id: str, attempt: int, /) -> Recorder: ...


class Recorder(Protocol):
    """Merges the spans of a node."""

    def span(
        self, start_s: float, end_s: float, seconds: Mapping[Owner, float], step: int | None, /
    ) -> None: ...


@dataclass
class _Known:
    """A worker that lives, with the epoch seconds of its first and last beat."""

    role: Role
    since_s: float
    heard_s: float
    num_ended: int
    recorder: Recorder | None = None


@dataclass
class Books:
    """Kept by every router; written by the one that serves, from :meth:`open` on.

    ``usd_per_hour`` is the price of a replica of each role; None is unknown.
    """

    usd_per_hour: Mapping[Role, Decimal | None]
    _writer: Writer | None = None
    _known: dict[str, _Known] = field(default_factory=dict)
    _gone: deque[NodeDown] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _served: dict[str, Served] = field(default_factory=dict)

    def open(self, writer: Writer) -> None:
        """From now on this router serves."""
        self._writer = writer
        for record in self._gone:  # which another router may not have come to write
            writer.write(record)
        for worker_id, worker in self._known.items():
            self._up(writer, worker_id, worker)

    def beat(self, beat: Beat, now_s: float) -> None:
        """A worker is heard of."""
        load, worker = beat.load, self._known.get(beat.worker_id)
        if worker is not None and now_s - worker.heard_s >= GIVEN_UP_S:
            self._down(beat.worker_id, worker)
            worker = None
        if worker is None:
            worker = self._known[beat.worker_id] = _Known(beat.role, now_s, now_s, load.num_ended)
            if self._writer is not None:
                self._up(self._writer, beat.worker_id, worker)
            return
        if worker.recorder is not None and now_s > worker.heard_s:
            is_busy = load.num_running or load.num_waiting or load.num_ended != worker.num_ended
            owner = Owner.COMPUTE if is_busy else Owner.IDLE
            worker.recorder.span(worker.heard_s, now_s, {owner: now_s - worker.heard_s}, None)
        worker.heard_s, worker.num_ended = max(worker.heard_s, now_s), load.num_ended

    def ended(self, one: Served) -> None:
        """A request of a key has had its answer, or what there was of it."""
        before = self._served.get(one.key)
        self._served[one.key] = one if before is None else before + one

    def tick(self, now_s: float) -> None:
        """Write what has come together. Every :data:`FLUSH_S` and at the end."""
        for worker_id, worker in list(self._known.items()):
            if now_s - worker.heard_s >= GIVEN_UP_S:
                self._down(worker_id, worker)
        if self._writer is not None:
            for each in self._served.values():
                self._writer.write(each)
        self._served.clear()

    def close(self, now_s: float) -> None:
        """The endpoint ends, and its workers with it."""
        self.tick(now_s)
        for worker_id, worker in list(self._known.items()):
            self._down(worker_id, worker)
        self._writer = None

    def _up(self, writer: Writer, worker_id: str, worker: _Known) -> None:
        price = self.usd_per_hour.get(worker.role)
        worker.recorder = writer.recorder(worker_id, 0)
        writer.write(
            NodeUp(
                node_id=worker_id,
                time_s=worker.since_s,  # another router's record may be lost
                instance_type=worker.role,
                market=Market.ON_DEMAND,
                usd_per_hour=price,
                usd_per_hour_on_demand=price,
            )
        )

    def _down(self, worker_id: str, worker: _Known) -> None:
        del self._known[worker_id]
        record = NodeDown(node_id=worker_id, time_s=worker.heard_s)
        if self._writer is not None:
            self._writer.write(record)
        else:
            self._gone.append(record)
