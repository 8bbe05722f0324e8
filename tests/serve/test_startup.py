"""What a starting endpoint is said to be doing, and why it failed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ebbtide.serve.startup import Progress, progress, root_cause, root_cause_in


def application(status: str, **deployments: Any) -> Any:
    return SimpleNamespace(
        status=SimpleNamespace(value=status), message="broken", deployments=deployments
    )


def deployment(message: str = "", **states: int) -> Any:
    return SimpleNamespace(message=message, replica_states=states)


def test_progress() -> None:
    assert progress(None).state == "starting"
    assert progress(application("RUNNING")).state == "running"
    assert progress(
        application("DEPLOYING", prefill=deployment(STARTING=2, RUNNING=1), ingress=deployment())
    ) == Progress("starting", "prefill 1 of 3, ingress 0 of 0")
    failed = progress(application("DEPLOY_FAILED", a=deployment("no memory"), b=deployment()))
    assert failed == Progress("failed", "no memory")
    assert progress(application("UNHEALTHY")).text == "broken"


_LOG = """\
INFO 11-29 starting
(Worker pid=1) ERROR 11-29 [multiproc.py:1] Traceback (most recent call last):
(Worker pid=1) ERROR 11-29 [multiproc.py:1] RuntimeError: Unsupported head size 16
(EngineCore pid=2) RuntimeError: Engine core initialization failed. See root cause above.
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica
done
"""


def test_the_root_cause_is_the_exception_that_others_follow_from() -> None:
    assert root_cause(_LOG) == "RuntimeError: Unsupported head size 16"
    assert root_cause("all is well\n") is None
    assert root_cause("vllm.errors.BadError: no") == "vllm.errors.BadError: no"


def test_the_root_cause_is_looked_for_in_worker_logs(tmp_path: Path) -> None:
    assert root_cause_in(tmp_path) is None
    logs = tmp_path / "session" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("OSError: not a worker\n")
    (logs / "worker-1.out").write_text("nothing\n")
    (logs / "worker-2.err").write_text(_LOG)
    assert root_cause_in(tmp_path) == "RuntimeError: Unsupported head size 16"
