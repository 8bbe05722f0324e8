"""Environment variables by which Ray can be told what none of its documented options says.

Names and values only, no Ray. The lower-case ones are of Ray's compiled processes, which ignore a
name that they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping

FAST_FAILURE_DETECTION: Mapping[str, str] = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""A dead node is declared dead after about two seconds instead of about half a minute."""

RAYS_FAILURE_DETECTION: Mapping[str, str] = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
"""What Ray does by itself."""

PATIENT_FAILURE_DETECTION: Mapping[str, str] = {
    "RAY_health_check_period_ms": "5000",
    "RAY_health_check_timeout_ms": "10000",
}
"""For nodes that are kept so busy for a minute that their raylet is slow, and not dead."""

QUIET_NODE: Mapping[str, str] = {
    "RAY_enable_metrics_collection": "0",  # its port would be open to all interfaces
    "RAY_worker_niceness": "0",  # 15 as it comes
}
"""For the processes of a node on a machine that is used for other things."""

QUIET_SERVE: Mapping[str, str] = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # 0.1 as it comes
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "0",  # 100: gauges of requests, of which it sees none
}
"""For the processes of Ray Serve, which work in these intervals whether there is anything to do or
not."""

NO_LOG_OF_CALLS: Mapping[str, str] = {
    "RAY_task_events_report_interval_ms": "0",  # 1000 as it comes
}
"""For processes that are called all the time: the control service is not told of each call, and
``ray list tasks`` shows none."""

QUICK_METRICS: Mapping[str, str] = {
    "RAY_enable_metrics_collection": "1",
    "RAY_metrics_report_interval_ms": "1000",  # 10 s as it comes
}
"""For nodes whose metrics are looked at, where their port may be open."""

CONTROLLER: Mapping[str, str] = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # 2 s as it comes
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",  # 60 s as it comes
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
"""For Ray Train's controller and its workers. The time-out is used for placing the group only."""

SWEEP: Mapping[str, str] = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one writes to stdout at every verbosity
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # TensorBoard's would import torch into the driver
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # the evaluator checks, and fails one trial only
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends the command, not just the loop
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # the sweep's own table shows them
}
"""For the driver of a sweep."""


def node_id(of: str) -> dict[str, str]:
    """The environment with which ``ray start`` gives a node this id (hexadecimal, 28 bytes)."""
    return {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": of}


SERVE_REPLICA_MODULE = "ray.serve._private.replica"
"""Where Ray Serve has the actor of its replicas, which each of them imports."""
