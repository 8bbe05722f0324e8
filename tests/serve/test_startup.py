"""What a starting endpoint is said to be doing, and why it failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ebbtide.platform.errors import ServeError
from ebbtide.serve.startup import Progress, progress, reason, root_cause


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
(EngineCore pid=2) RuntimeError: Worker failed with error 'Unsupported head size 16', see above
(EngineCore pid=2) RuntimeError: Engine core initialization failed. See root cause above.
ray.exceptions.RayTaskError(RuntimeError): ray::ServeReplica
RuntimeError: Traceback (most recent call last):
done
"""


def test_the_root_cause_is_the_exception_that_others_follow_from() -> None:
    assert root_cause(_LOG) == "RuntimeError: Unsupported head size 16"
    assert root_cause("all is well\n") is None
    assert root_cause("vllm.errors.BadError: no") == "vllm.errors.BadError: no"


def test_an_engine_whose_process_failed_has_its_reason_in_the_log() -> None:
    failed = RuntimeError("Engine core initialization failed. Failed core proc(s): {'e': -9}")
    assert reason(failed, _LOG) == "RuntimeError: Unsupported head size 16"
    assert reason(failed, "") == f"RuntimeError: {failed}"


def test_an_engine_that_refuses_its_options_says_why_itself() -> None:
    assert reason(ValueError("no\n  such thing"), _LOG) == "ValueError: no such thing"
    assert reason(ServeError("weights.bin is damaged"), _LOG) == "weights.bin is damaged"

    class Options(BaseModel):
        count: int

    with pytest.raises(ValidationError) as refused:
        Options.model_validate({"count": "many"})
    assert reason(refused.value, "") == (
        "ValidationError: 1 validation error for Options count Input should be a valid integer, "
        "unable to parse string as an integer"
    )


def test_a_failed_deployment_is_told_by_its_reason_alone() -> None:
    message = f"""\
The deployment failed to start 1 times in a row. See controller logs for details. Error:
ray::ServeReplica:tide:prefill:tide.initialize_and_get_metadata() (pid=1, ip=127.0.0.3)
  File "replica.py", line 1928, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 1
RuntimeError: Engine core initialization failed.

The above exception was the direct cause of the following exception:

{ServeError.__module__}.ServeError: ValueError: no memory for KV: give more
"""
    slow = "Deployment 'decode' has 1 replicas that have taken more than 30s to initialize."
    failed = progress(application("DEPLOY_FAILED", b=deployment(slow), a=deployment(message)))
    assert failed == Progress("failed", "ValueError: no memory for KV: give more")
