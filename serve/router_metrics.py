"""What a router counts and times, in Prometheus' text."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class RouterMetrics:
    """One router's counters; a restarted router begins at zero, as Prometheus expects."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "ebbtide_requests",
            "Answered requests",
            ["key", "path", "status"],
            registry=self._registry,
        )
        self.tokens = Counter(
            "ebbtide_tokens",
            "Tokens of prompts and answers",
            ["key", "kind"],
            registry=self._registry,
        )
        self.moves = Counter(
            "ebbtide_moved_streams", "Streams that went on elsewhere", registry=self._registry
        )
        self.lost = Counter(
            "ebbtide_lost_streams", "Streams that ended in an error event", registry=self._registry
        )
        self.prefills = Counter(
            "ebbtide_prefills",
            "Where prompts were computed",
            ["where"],
            registry=self._registry,
        )
        self.ttft = Histogram(
            "ebbtide_time_to_first_token_seconds",
            "From the request to the first token sent",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.prefill = Histogram(
            "ebbtide_remote_prefill_seconds",
            "At a prefill worker",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.gap = Histogram(
            "ebbtide_inter_token_seconds",
            "Between two chunks of a stream",
            buckets=_GAPS,
            registry=self._registry,
        )
        self.workers = Gauge(
            "ebbtide_ready_workers", "Workers that get requests", ["role"], registry=self._registry
        )
        self.running = Gauge(
            "ebbtide_running_requests", "Requests at work", registry=self._registry
        )

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)
