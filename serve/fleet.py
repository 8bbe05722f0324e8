"""The workers that a router knows of, by what they say of themselves and what becomes of requests.

Every worker says every second that it lives (:class:`Beat`). Promises: a worker that is silent,
whose engine does not answer, or at which a request has just failed gets no request while another
one can; choices are pure functions of what is known. No clock of its own: callers give the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ebbtide.serve.config import Role
from ebbtide.serve.prefixes import Prefixes

BEAT_S = 1.0
IDLE_BEAT_S = 2.0
"""While its engine has nothing to do."""
SILENT_S = 4.0
"""A worker that has not been heard of for so long gets no requests while another can; for as much
longer as it has said that it will be silent."""
STUCK_S = 6.0
"""Nor one whose engine has not answered its own replica for so long."""
GIVEN_UP_S = 20.0
"""After this nothing is expected of either any more, and a stuck engine is replaced."""
SHUNNED_S = 5.0
"""After a failed request, unless the worker beats again from a new address."""


@dataclass(frozen=True)
class EngineLoad:
    """Sequences in an engine, and the part of its KV blocks that they hold (0 to 1).

    Blocks that are only kept for their prefixes are free; those that wait to be fetched are not.
    ``queue_s`` is what all requests that it has ended, ``num_ended``, have waited for their turn.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    queue_s: float = 0.0
    num_ended: int = 0


@dataclass(frozen=True)
class Beat:
    """What a worker says: who it is, where it listens, and for how long its engine is silent.

    One that ``is_leaving`` ends what it has begun, and is to get nothing new. Workers of one
    ``generation`` have the same model. The next beat comes in ``next_s``.
    """

    worker_id: str
    role: Role
    url: str
    max_model_len: int
    engine_silent_s: float = 0.0
    is_leaving: bool = False
    load: EngineLoad = EngineLoad()
    generation: int = 1
    next_s: float = BEAT_S


@dataclass(eq=False)
class Worker:
    """One engine, as the router sees it."""

    last: Beat
    heard_s: float
    shunned_until_s: float = 0.0
    num_requests: int = 0
    num_queued_tokens: int = 0
    output_s: float = 0.0
    prefixes: Prefixes = field(default_factory=Prefixes)

    def is_ready(self, now_s: float) -> bool:
        """Whether new requests may go there."""
        return (
            now_s - self.heard_s < SILENT_S + self.last.next_s - BEAT_S
            and not self.is_stuck
            and not self.last.is_leaving
            and now_s >= self.shunned_until_s
        )

    def describe(self, now_s: float) -> str:
        """Its state, for the log."""
        heard_s, shunned_s = now_s - self.heard_s, max(0.0, self.shunned_until_s - now_s)
        return (
            f"{self.last.worker_id}: heard of {heard_s:.1f} s ago, its engine silent for"
            f" {self.last.engine_silent_s:.1f} s, shunned for {shunned_s:.1f} s"
            f"{', leaving' if self.last.is_leaving else ''}"
        )

    @property
    def is_stuck(self) -> bool:
        """Whether its engine does not answer, for the time being or for ever."""
        return self.last.engine_silent_s >= STUCK_S

    def is_gone(self, now_s: float) -> bool:
        """Whether nothing more is to be expected of what is at work there."""
        return max(now_s - self.heard_s, self.last.engine_silent_s) >= GIVEN_UP_S


class Fleet:
    """All workers of one endpoint. ``replica_s``: seconds that those of each role have lived.

    ``open`` are the generations that new requests may go to; what another one has begun ends there.
    """

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}
        self.open: frozenset[int] = frozenset({1})
        self.replica_s: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self.changed: Callable[[], None] = lambda: None

    def beat(self, beat: Beat, now_s: float) -> None:
        """A worker is heard of."""
        worker = self._workers.get(beat.worker_id)
        if worker is None or worker.last.url != beat.url:
            self._workers[beat.worker_id] = Worker(beat, now_s)
        else:
            if not worker.is_gone(now_s):
                self.replica_s[beat.role] += now_s - worker.heard_s
            worker.last, worker.heard_s = beat, now_s
        self.forget_silent(now_s)
        self.changed()

    def forget_silent(self, now_s: float) -> None:
        """Drop workers that will not come back under the same id."""
        for name, worker in list(self._workers.items()):
            if now_s - worker.heard_s > 60 and not worker.num_requests:
                del self._workers[name]

    def workers(self) -> list[Worker]:
        """All that are known, ready or not."""
        return list(self._workers.values())

    def of(self, generation: int | None = None) -> list[Worker]:
        """Those of a generation, or all that new requests may go to."""
        wanted = self.open if generation is None else {generation}
        return [each for each in self._workers.values() if each.last.generation in wanted]

    def ready(self, role: Role, now_s: float, generation: int | None = None) -> list[Worker]:
        """The workers of a role that may get requests."""
        return [w for w in self.of(generation) if w.last.role == role and w.is_ready(now_s)]

    def for_decode(
        self,
        keys: list[int],
        now_s: float,
        tried: Collection[str],
        generation: int | None = None,
    ) -> Worker | None:
        """Where an answer is to be produced: a decode worker, else a prefill worker, which can do
        all of it too, else one that does not look well, which is better than no answer."""
        left = [each for each in self.of(generation) if each.last.url not in tried]
        well = [each for each in left if each.is_ready(now_s)]
        for found in (
            [each for each in well if each.last.role == "decode"],
            well,
            [each for each in left if not each.is_gone(now_s) and not each.last.is_leaving],
        ):
            if found:
                return choose(found, keys)
        return None

    def is_ready(self, now_s: float) -> bool:
        """Whether requests are answered."""
        return any(each.is_ready(now_s) for each in self.of())

    def for_prefill(
        self, keys: list[int], now_s: float, generation: int | None = None
    ) -> Worker | None:
        """Where a prompt is to be computed; None if there is no such worker."""
        found = self.ready("prefill", now_s, generation)
        return choose(found, keys) if found else None


def choose(workers: list[Worker], keys: list[int]) -> Worker:
    """The worker with the least to do, where what it knows of the prompt is work that is done.

    A request at work counts as much as 256 characters of a prompt that are still to be computed.
    """
    return min(workers, key=lambda w: 256 * w.num_requests - w.prefixes.known(keys))
