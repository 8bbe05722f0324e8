"""What a router counts and times, in Prometheus' text."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ebbtide.serve.config import Role
from ebbtide.serve.fleet import Fleet

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class RouterMetrics:
    """One router's counters; a restarted router begins at zero, as Prometheus expects.

    ``usd_per_hour`` is the price of a replica of each role; where one is unknown, so is the cost.
    """

    def __init__(self, usd_per_hour: Mapping[Role, Decimal | None] | None = None) -> None:
        self._registry = CollectorRegistry()
        self._usd_per_hour, self._num_tokens = usd_per_hour or {}, 0
        self.num_prefills = {"local": 0, "remote": 0}
        registry = self._registry
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        self.requests = counter("ebbtide_requests", "Answered requests", ["key", "path", "status"])
        self.tokens = counter("ebbtide_tokens", "Tokens of prompts and answers", ["key", "kind"])
        self.moves = counter("ebbtide_moved_streams", "Streams that went on elsewhere")
        self.lost = counter("ebbtide_lost_streams", "Streams that ended in an error event")
        self.hangs = counter("ebbtide_hung_requests", "Requests whose worker was left as it hung")
        self.prefills = counter("ebbtide_prefills", "Where prompts were computed", ["where"])
        self.ttft = histogram(
            "ebbtide_time_to_first_token_seconds", "From the request to the first token sent"
        )
        self.queue = histogram("ebbtide_queue_seconds", "Until there was a worker for a request")
        self.prefill = histogram("ebbtide_remote_prefill_seconds", "At a prefill worker")
        self.first_token = histogram(
            "ebbtide_first_token_at_decode_seconds",
            "From asking a decode worker to its first token: its queue, then fetching (remote) or"
            " computing (local) the prompt's keys and values",
            ["prefill"],
        )
        self.decode = histogram("ebbtide_decode_seconds", "From a stream's first token to its last")
        self.gap = histogram(
            "ebbtide_inter_token_seconds", "Between two chunks of a stream", buckets=_GAPS
        )
        self.workers = gauge("ebbtide_ready_workers", "Workers that get requests", ["role"])
        self.engine_sequences = gauge(
            "ebbtide_engine_sequences", "In a worker's engine", ["role", "worker", "state"]
        )
        self.kv_usage = gauge(
            "ebbtide_engine_kv_usage_ratio",
            "KV blocks of a worker that are held by sequences or wait to be fetched",
            ["role", "worker"],
        )
        self.engine_queue_s = gauge(
            "ebbtide_engine_queue_seconds",
            "What all ended requests of a worker's engine have waited for their turn",
            ["role", "worker"],
        )
        self.engine_ended = gauge(
            "ebbtide_engine_requests",
            "Requests that a worker's engine has ended",
            ["role", "worker"],
        )
        self.replica_s = gauge(
            "ebbtide_replica_seconds", "Seconds that workers have lived", ["role"]
        )
        self.cost = gauge(
            "ebbtide_cost_usd",
            "What the replica-seconds cost, and that for a million tokens of prompts and answers",
            ["of"],
        )
        self.running = gauge("ebbtide_running_requests", "Requests at work")
        self.waiting = gauge("ebbtide_waiting_requests", "Requests that wait for a first worker")

    def count_prefill(self, where: str) -> None:
        """A prompt is computed by the decode worker (local) or by a prefill worker (remote)."""
        self.prefills.labels(where).inc()
        self.num_prefills[where] += 1

    def count_tokens(self, key: str, num_prompt: int, num_output: int) -> None:
        """A request of a key has ended."""
        self.tokens.labels(key, "prompt").inc(num_prompt)
        self.tokens.labels(key, "output").inc(num_output)
        self._num_tokens += num_prompt + num_output

    def gaps(self) -> tuple[float, int]:
        """The sum of all gaps so far, in seconds, and how many there were."""
        (found,) = self.gap.collect()
        of = {sample.name: sample.value for sample in found.samples}
        return of[f"{found.name}_sum"], int(of[f"{found.name}_count"])

    def _tell_cost(self, replica_s: Mapping[Role, float]) -> None:
        for role, seconds in replica_s.items():
            self.replica_s.labels(role).set(seconds)
        usd = cost_usd(replica_s, self._usd_per_hour)
        self.cost.clear()
        if usd is not None:
            self.cost.labels("all").set(usd)
            if self._num_tokens:
                self.cost.labels("per_million_tokens").set(usd / self._num_tokens * 1_000_000)

    def text(self, fleet: Fleet, now_s: float) -> bytes:
        """The exposition, with what the workers have said of themselves."""
        self._tell_cost(fleet.replica_s)
        of_workers = (self.engine_sequences, self.kv_usage, self.engine_queue_s, self.engine_ended)
        for gauge in (self.workers, *of_workers):
            gauge.clear()
        for role in ("prefill", "decode"):
            self.workers.labels(role).set(0)
        for worker in fleet.workers():
            beat = worker.last
            if worker.is_ready(now_s) and beat.generation in fleet.open:
                self.workers.labels(beat.role).inc()
            if not worker.is_gone(now_s):
                names, load = (beat.role, beat.worker_id), beat.load
                self.kv_usage.labels(*names).set(load.kv_usage)
                self.engine_queue_s.labels(*names).set(load.queue_s)
                self.engine_ended.labels(*names).set(load.num_ended)
                self.engine_sequences.labels(*names, "running").set(load.num_running)
                self.engine_sequences.labels(*names, "waiting").set(load.num_waiting)
        return generate_latest(self._registry)


def cost_usd(
    replica_s: Mapping[Role, float], usd_per_hour: Mapping[Role, Decimal | None]
) -> float | None:
    """Seconds times prices; None where workers of a role without a price have lived."""
    total = 0.0
    for role, seconds in replica_s.items():
        if seconds:
            price = usd_per_hour.get(role)
            if price is None:
                return None
            total += seconds / 3600 * float(price)
    return total
