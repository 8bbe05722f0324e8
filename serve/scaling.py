"""How many workers of each role there should be: a pure decision over what the routers know.

Prefill workers follow from prompts: so many that what is queued is computed within the target for
the first token. Decode workers follow from streams: the fullest of gap, KV blocks and waiting
sequences, each in proportion, as all three grow with the streams of a worker. Each role has its own
need, from which their ratio follows. Workers are added at once, for requests wait; they are taken
away when none of the needs of the last ``down_after_s`` was higher, for a load may come back, and
an engine takes long to start. Where every role may have none, all go together after ``idle_s``
without a request, and the first request brings them back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbtide.serve.config import Role, ScalingConfig

Counts = Mapping[Role, int]

_FULL_KV = 0.8
"""Above this part of its KV blocks an engine soon has to preempt sequences."""
_TOLERANCE = 0.1
"""A need that is so near to what is there is met: measurements are not exact."""


@dataclass(frozen=True)
class Bounds:
    """The fewest and the most workers of a role."""

    least: int
    most: int


@dataclass(frozen=True)
class Known:
    """What a router knows of its requests and workers.

    ``num_queued_tokens`` of prompts wait at prefill workers, one of which computes
    ``prefill_tokens_per_s`` (below 1: not known yet). ``num_sequences`` are in the decode engines,
    ``num_engine_waiting`` of them not yet admitted, and ``kv_usage`` (0 to 1) is that of all their
    blocks. ``gap_s`` is the mean gap between tokens of late (0: there were none). ``num_waiting``
    requests have no worker at all. ``idle_s`` have passed since there was any request.
    """

    ready: Counts
    num_queued_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    num_sequences: int = 0
    num_engine_waiting: int = 0
    kv_usage: float = 0.0
    gap_s: float = 0.0
    num_waiting: int = 0
    idle_s: float = 0.0


def need(known: Known, config: ScalingConfig) -> dict[Role, int]:
    """How many workers what is known asks for, whatever the bounds."""
    prefill = 0
    if known.prefill_tokens_per_s >= 1:
        in_time = known.prefill_tokens_per_s * config.ttft_s
        prefill = math.ceil(known.num_queued_tokens / in_time - _TOLERANCE)
    decode = known.ready.get("decode", 0)
    if known.num_sequences == 0:
        return {"prefill": prefill, "decode": 0}
    running = max(1, known.num_sequences - known.num_engine_waiting)
    fullest = max(
        known.gap_s / config.gap_s,
        known.kv_usage / _FULL_KV,
        known.num_sequences / running if known.num_engine_waiting else 0.0,
    )
    return {"prefill": prefill, "decode": max(1, math.ceil(decode * fullest - _TOLERANCE))}


@dataclass
class Scaler:
    """Decides again and again; remembers what was needed of late. Callers give the time."""

    bounds: Mapping[Role, Bounds]
    config: ScalingConfig
    _late: deque[tuple[float, dict[Role, int]]] = field(default_factory=deque)

    def decide(self, now_s: float, known: Known, present: Counts) -> dict[Role, int]:
        """How many workers of each role there should be from now on, where ``present`` are wanted
        so far, whether they are ready or not."""
        if self._may_be_none and known.num_waiting == 0:
            if not any(present.values()):
                return dict.fromkeys(self.bounds, 0)
            if known.idle_s >= self.config.idle_s:
                self._late.clear()
                return dict.fromkeys(self.bounds, 0)
        if not any(present.values()):
            self._late.clear()
            return {role: max(1, each.least) for role, each in self.bounds.items()}
        self._late.append((now_s, need(known, self.config)))
        while len(self._late) > 1 and self._late[1][0] <= now_s - self.config.down_after_s:
            self._late.popleft()  # the next one tells how it was at the beginning of that time
        return {role: self._of(role, present[role], now_s) for role in self.bounds}

    @property
    def _may_be_none(self) -> bool:
        return all(each.least == 0 for each in self.bounds.values())

    def _of(self, role: Role, present: int, now_s: float) -> int:
        bounds = self.bounds[role]
        wanted = self._late[-1][1][role]
        if wanted < present:
            wanted = min(present, max(needed[role] for _, needed in self._late))
            if now_s - self._late[0][0] < self.config.down_after_s:
                wanted = present  # too little is known of the time before
        return min(bounds.most, max(1, bounds.least, wanted))
