"""One trial, in the child process that runs it and nothing else.

The child is forked from a warm zygote, talks to its evaluator in JSON lines over a socket, and ends
when its trial does, so nothing a trial changes can reach another. It promises one final message
(``done`` or ``failed``) unless it is killed.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ebbtide.platform.errors import EbbtideError

Metrics = dict[str, float]
Report = Callable[[Metrics], None]
TrialFunction = Callable[[dict[str, Any], dict[str, Any], Report], Metrics]
"""Called with the base job, this trial's values by dotted key, and a function to report with."""


@dataclass(frozen=True)
class TrialRequest:
    """What a child needs to know. ``function`` is a :data:`TrialFunction` as ``module:function``;
    ``environment`` is set, and ``cwd`` entered and importable, before it is looked up."""

    trial_id: str
    function: str
    base: dict[str, Any]
    values: dict[str, Any]
    metric: str
    timeout_s: float
    cwd: str | None = None
    environment: Mapping[str, str] | None = None

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def train(base: dict[str, Any], values: dict[str, Any], report: Report) -> Metrics:
    """The trial of a sweep over a training job: the training itself, in this process."""
    from ebbtide.train.config import TrainConfig
    from ebbtide.train.trial import run_trial
    from ebbtide.tune.space import with_values

    return run_trial(with_values(TrainConfig.model_validate(base), values), report)


def _resolve(spec: str) -> TrialFunction:
    module, _, name = spec.partition(":")
    function: TrialFunction = getattr(importlib.import_module(module), name)
    return function


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"the trial called sys.exit({error.code!r})"
    if isinstance(error, EbbtideError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _enter(request: TrialRequest) -> None:
    """The surroundings that a process of its own, started in the sweep's folder, would have."""
    os.environ.update(request.environment or {})
    if request.cwd is not None and os.path.isdir(request.cwd):
        os.chdir(request.cwd)
    sys.path.insert(0, os.getcwd())
    random.seed()  # else all children of one zygote would draw alike
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def imported_since(known: set[str]) -> list[str]:
    """Installed modules that are not in ``known``, in the order of their import.

    The user's own are left out: they may change between two trials.
    """
    installed = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in known and (getattr(module, "__file__", None) or "").startswith(installed)
    ]


def serve(connection: socket.socket) -> None:
    """Wait for a request, run it, send the outcome. Returns when the child may end."""
    stream = connection.makefile("rwb")
    known = set(sys.modules)

    def send(event: str, **fields: Any) -> None:
        stream.write(json.dumps({"event": event, **fields}).encode() + b"\n")
        stream.flush()

    def report(metrics: Metrics) -> None:
        """Hand over a result and wait for the word to go on, so that none is lost or surplus."""
        send("report", metrics=metrics)
        if not stream.readline():
            os._exit(0)  # the evaluator is gone

    line = stream.readline()
    if not line:
        return
    request = TrialRequest(**json.loads(line))
    try:
        _enter(request)
        final = _resolve(request.function)(request.base, request.values, report)
        send("done", metrics=dict(final), imported=imported_since(known))
    except BaseException as error:  # whatever it is, it is this trial's outcome
        send(
            "failed",
            reason=_reason(error),
            details=traceback.format_exc(),
            may_retry=isinstance(error, SystemExit),
        )
