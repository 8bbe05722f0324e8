"""How far a starting endpoint is, and why it failed: pure over what Serve reports and logs hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ebbtide.platform.errors import EbbtideError

State = Literal["starting", "running", "failed"]

_CAUSE = re.compile(r"(?:^|[\s\]])((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt): .+)$")
_CONSEQUENCES = (
    "RayTaskError",
    "Engine core initialization failed",
    "EngineDeadError",
    "Error: Traceback (most recent call last)",
    "Worker failed with error",
)
_PYDANTIC = re.compile(r" \[type=.*?, input_type=\w+\]| For further information visit \S+")
_OURS = re.compile(r"^(?:\w+\.)*ServeError: ")


@dataclass(frozen=True)
class Progress:
    """The state of the application, and a line about it for people."""

    state: State
    text: str


def progress(application: Any) -> Progress:
    """Of one application in ``serve.status()``; None while Serve does not know it yet."""
    if application is None:
        return Progress("starting", "not deployed yet")
    status = str(application.status.value)
    if status == "RUNNING":
        return Progress("running", "all replicas run")
    if status in ("DEPLOY_FAILED", "UNHEALTHY", "DELETING"):
        messages = [each.message for each in application.deployments.values() if each.message]
        text = "\n".join(messages) or application.message or status
        return Progress("failed", _OURS.sub("", root_cause(text) or text))
    counts = {name: _running(each.replica_states) for name, each in application.deployments.items()}
    return Progress("starting", ", ".join(f"{name} {text}" for name, text in counts.items()))


def together(each: Sequence[Progress]) -> Progress:
    """Of several applications: running when all do, also when there are none, failed when one
    has."""
    failed = [one for one in each if one.state == "failed"]
    if failed:
        return failed[0]
    waiting = [one for one in each if one.state == "starting"]
    if waiting:
        return Progress("starting", ", ".join(one.text for one in waiting))
    return Progress("running", "all replicas run")


def _running(replica_states: Mapping[Any, int]) -> str:
    by_name = {str(getattr(state, "value", state)): n for state, n in replica_states.items()}
    return f"{by_name.get('RUNNING', 0)} of {sum(by_name.values())}"


def root_cause(text: str) -> str | None:
    """The exception in a log that the others follow from: the last that is not a consequence."""
    causes = [match[1] for line in text.splitlines() if (match := _CAUSE.search(line.rstrip()))]
    return next((c for c in reversed(causes) if not any(k in c for k in _CONSEQUENCES)), None)


def reason(error: Exception, log: str) -> str:
    """Why an engine did not start, in one line: out of what it raised, and the log it wrote before.

    The process that failed has the reason in its log; what it raises elsewhere may say no more than
    that it failed.
    """
    if isinstance(error, EbbtideError):
        return str(error)
    text = f"{type(error).__name__}: {_PYDANTIC.sub('', ' '.join(str(error).split()))}"
    if any(consequence in text for consequence in _CONSEQUENCES):
        return root_cause(log) or text
    return text
