"""How much each client has used, and whether it may go on: token buckets over a given time.

Pure but for what it remembers. A bucket holds a minute's worth and fills evenly. Tokens of an
answer are known only afterwards, so a bucket of tokens may run into debt, which the client then
waits for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ebbtide.serve.keys import Limits


@dataclass
class _Bucket:
    per_minute: int
    level: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        gained = (now_s - self.filled_s) * self.per_minute / 60
        self.level, self.filled_s = min(float(self.per_minute), self.level + gained), now_s

    def wait_s(self) -> float:
        """Until one more can be taken."""
        return max(0.0, (1 - self.level) * 60 / self.per_minute)


@dataclass(frozen=True)
class Refusal:
    """Which limit is reached, and after how many whole seconds to try again."""

    limit: str
    retry_after_s: int


@dataclass
class Usage:
    """Of one client."""

    limits: Limits
    num_running: int = 0
    _requests: _Bucket | None = field(default=None, repr=False)
    _tokens: _Bucket | None = field(default=None, repr=False)

    def admit(self, now_s: float) -> Refusal | None:
        """Count a request in, or say why not. An admitted one has to be followed by ``end``."""
        limits = self.limits
        if (
            limits.concurrent_requests is not None
            and self.num_running >= limits.concurrent_requests
        ):
            return Refusal(f"{limits.concurrent_requests} requests at once", 1)
        self._requests = _filled(self._requests, limits.requests_per_minute, now_s)
        self._tokens = _filled(self._tokens, limits.tokens_per_minute, now_s)
        for bucket, unit in ((self._requests, "requests"), (self._tokens, "tokens")):
            if bucket is not None and bucket.level < 1:
                text = f"{bucket.per_minute} {unit} per minute"
                return Refusal(text, max(1, math.ceil(bucket.wait_s())))
        if self._requests is not None:
            self._requests.level -= 1
        self.num_running += 1
        return None

    def end(self, num_tokens: int) -> None:
        """A request that was admitted is over; it used this many tokens."""
        self.num_running -= 1
        if self._tokens is not None:
            self._tokens.level -= num_tokens


def _filled(bucket: _Bucket | None, per_minute: int | None, now_s: float) -> _Bucket | None:
    if per_minute is None:
        return None
    bucket = bucket or _Bucket(per_minute, float(per_minute), now_s)
    bucket.fill(now_s)
    return bucket
