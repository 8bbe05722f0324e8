"""The figures of a run as Prometheus gets them, through Ray's own metrics.

``METRICS`` is the list of all of them. Ray puts ``ray_`` before each name, adds labels of its own
(node, session) and serves them at every node's metrics port; the dashboards in ``grafana/`` are
made of nothing else. All are gauges: what adds up comes from the run's ledger and events, so that
it is right after a restart of the driver, too. Ray forgets a gauge that was not set for two of its
export intervals (20 s), so all are set again and again; what is not known is not set, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

PREFIX = "ebbtide_run_"
RUN = "run"
"""The label of every metric: the run's name."""


class Sample(NamedTuple):
    """One figure; ``tags`` has exactly the labels that the metric has beside the run."""

    name: str
    value: float
    tags: Mapping[str, str] = {}


class Metric(NamedTuple):
    """What a figure is, with its unit, and its labels beside the run."""

    text: str
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, Metric] = {
    "step": Metric("Steps that are finished"),
    "steps": Metric("Steps that the job has"),
    "loss": Metric("Training loss of the newest step, nats per token"),
    "validation_loss": Metric("Newest validation loss, nats per token"),
    "grad_norm": Metric("Norm of the newest gradient, before clipping"),
    "learning_rate": Metric("Learning rate of the newest step"),
    "tokens": Metric("Unmasked tokens of the kept steps"),
    "tokens_per_second": Metric("Unmasked tokens a second, over the newest steps"),
    "step_seconds": Metric("Seconds of rank 0's newest step, by owner", ("owner",)),
    "world_size": Metric("Ranks at work"),
    "attempt": Metric("Number of the attempt at work, from 0"),
    "nodes": Metric("Nodes of the run", ("market", "zone", "instance_type")),
    "steps_lost": Metric("Steps that had to be made again"),
    "interruptions": Metric("What ended attempts: notice, kill, failure", ("kind",)),
    "checkpoint_step": Metric("Steps in the newest committed checkpoint"),
    "checkpoint_seconds": Metric("Seconds from the newest checkpoint's begin to its commit"),
    "checkpoint_bytes": Metric("Bytes of the newest checkpoint"),
    "node_seconds": Metric("Node-seconds since the first start, by owner", ("owner", "market")),
    "goodput_ratio": Metric("Compute of kept steps over node-seconds"),
    "dollars": Metric("Dollars since the first start, by owner", ("owner", "market")),
    "dollars_on_demand": Metric("What the same node-seconds cost at on-demand prices"),
    "dollars_egress": Metric("Dollars for checkpoints that left the nodes' network"),
    "unpriced_node_seconds": Metric("Node-seconds without a known price, in no dollars here"),
    "dollars_per_hour": Metric("What the run's nodes cost an hour now"),
    "budget_ratio": Metric("Part of a limit that is used", ("limit",)),
}


class Publisher:
    """Sets the gauges of one run in this process, which is connected to a Ray cluster."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Any] = {}

    def publish(self, samples: Iterable[Sample]) -> None:
        """Set them; some microseconds each."""
        for sample in samples:
            self._gauge(sample.name).set(float(sample.value), {RUN: self._run, **sample.tags})

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge  # late: the seconds of importing Ray

            metric = METRICS[name]
            labels = (RUN, *metric.labels)
            self._gauges[name] = Gauge(PREFIX + name, metric.text, tag_keys=labels)
        return self._gauges[name]
