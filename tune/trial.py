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
    """What a child needs to know. ``function`` is a :data:`TrialFunction` as ``module:function``,
    or with ``is_user`` a :data:`UserFunction`, called with base and values in one dictionary;
    ``environment`` is set, and ``cwd`` entered and importable, before it is looked up.

    For the evaluator: ``sweep`` and ``number`` say whose trial it is, ``failures`` how often it
    has failed, ``skip`` how many of its results the sweep has heard already.
    """

    trial_id: str
    function: str
    base: dict[str, Any]
    values: dict[str, Any]
    metric: str
    timeout_s: float
    cwd: str | None = None
    environment: Mapping[str, str] | None = None
    is_user: bool = False
    sweep: str = ""
    number: int = 0
    failures: int = 0
    skip: int = 0

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class Context:
    """What a sweep's function gets beside its values. ``number``: of the trial, from 1."""

    def __init__(self, number: int, report: Report) -> None:
        self.number = number
        self._report = report
        self._last: Metrics = {}

    def report(self, metrics: Metrics) -> None:
        """Tell how the trial stands; the sweep may end it here. ``step`` counts the reports, unless
        ``metrics`` has one."""
        self._last = {"step": self._last.get("step", 0) + 1, **metrics}
        self._report(self._last)

    def final(self, metrics: Metrics | None) -> Metrics:
        """The last result: what was reported last, and what the function returned."""
        if metrics is not None and not isinstance(metrics, Mapping):
            raise TypeError(
                f"the function returned {type(metrics).__name__}; return a dictionary of metrics, "
                "or nothing if all is reported"
            )
        return {"step": 1, **self._last, **(metrics or {})}


UserFunction = Callable[[dict[str, Any], Context], Metrics | None]
"""Called with the trial's values; returns its metrics or reports them."""


def train(base: dict[str, Any], values: dict[str, Any], report: Report) -> Metrics:
    """The trial of a sweep over a training job: the training itself, in this process."""
    from ebbtide.train.config import TrainConfig
    from ebbtide.train.trial import run_trial
    from ebbtide.tune.space import with_values

    return run_trial(with_values(TrainConfig.model_validate(base), values), report)


def _resolve(spec: str) -> Callable[..., Any]:
    module, _, name = spec.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
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


def _run(request: TrialRequest, report: Report) -> Metrics:
    function = _resolve(request.function)
    if not request.is_user:
        metrics: Metrics = function(request.base, request.values, report)
        return metrics
    context = Context(request.number, report)
    return context.final(function({**request.base, **request.values}, context))


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
        final = _run(request, report)
        send("done", metrics=dict(final), imported=imported_since(known))
    except BaseException as error:  # whatever it is, it is this trial's outcome
        send(
            "failed",
            reason=_reason(error),
            details=traceback.format_exc(),
            may_retry=isinstance(error, SystemExit),
        )
