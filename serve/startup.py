"""How far a starting endpoint is, and why it failed: pure over what Serve reports and logs hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["starting", "running", "failed"]

_CAUSE = re.compile(r"(?:^|[\s\]])((?:\w+\.)*[A-Z]\w*(?:Error|Exception|Interrupt): .+)$")
_CONSEQUENCES = ("RayTaskError", "Engine core initialization failed", "EngineDeadError")
_MAX_LOG_BYTES = 2**20


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
        return Progress("failed", "\n".join(messages) or application.message or status)
    counts = {name: _running(each.replica_states) for name, each in application.deployments.items()}
    return Progress("starting", ", ".join(f"{name} {text}" for name, text in counts.items()))


def _running(replica_states: Mapping[Any, int]) -> str:
    by_name = {str(getattr(state, "value", state)): n for state, n in replica_states.items()}
    return f"{by_name.get('RUNNING', 0)} of {sum(by_name.values())}"


def root_cause(text: str) -> str | None:
    """The exception in a log that the others follow from: the last that is not a consequence."""
    causes = [match[1] for line in text.splitlines() if (match := _CAUSE.search(line.rstrip()))]
    return next((c for c in reversed(causes) if not any(k in c for k in _CONSEQUENCES)), None)


def root_cause_in(folder: Path) -> str | None:
    """The same over the worker logs of a local cluster, the most recently written first."""
    logs = [path for path in folder.rglob("worker-*") if path.suffix in (".err", ".out")]
    for path in sorted(logs, key=lambda path: path.stat().st_mtime, reverse=True):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_LOG_BYTES))
            if cause := root_cause(file.read().decode(errors="replace")):
                return cause
    return None
