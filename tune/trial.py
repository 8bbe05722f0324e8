"""One trial, in the child process that runs it and nothing else.

The child is forked from a warm zygote, talks to its evaluator in JSON lines over a socket, and ends
when its trial does, so nothing a trial changes can reach another. It promises one final message
(``done`` or ``failed``) unless it is killed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pickle
import random
import re
import resource
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ebbtide.platform.errors import EbbtideError

Metrics = dict[str, float]
Report = Callable[[Metrics], None]
TrialFunction = Callable[[dict[str, Any], dict[str, Any], "Reporter"], Metrics]
"""Called with the base job, this trial's values by dotted key, and what it reports with."""

GO = b"go\n"
_NO_MEMORY = re.compile("can't allocate memory|out of memory", re.IGNORECASE)  # torch's
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


_NO_STATE = (
    "the trial reports no state that another could go on from; give it to context.report as state"
)


@dataclass(frozen=True)
class TrialRequest:
    """What a child needs to know. ``function`` is a :data:`TrialFunction` as ``module:function``,
    or with ``is_user`` a :data:`UserFunction`, called with base and values in one dictionary;
    ``environment`` is set, and ``cwd`` entered and importable, before it is looked up.

    ``memory_bytes`` is all that its process may take, what it shares with others included.
    ``source`` is the file with the state to go on from. For the evaluator: ``sweep`` and ``number``
    say whose trial it is, ``failures`` how often it has begun anew, ``skip`` how many of its
    results the sweep has heard already. ``lineage`` is how the state to go on from came about: with
    which values, and after how many results of each it went on with the next.
    """

    trial_id: str
    function: str
    base: dict[str, Any]
    values: dict[str, Any]
    metric: str
    timeout_s: float
    memory_bytes: int | None = None
    cwd: str | None = None
    environment: Mapping[str, str] | None = None
    is_user: bool = False
    sweep: str = ""
    number: int = 0
    failures: int = 0
    skip: int = 0
    source: str | None = None
    lineage: Sequence[tuple[dict[str, Any], int]] = ()

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


class Reporter:
    """Hands over a result and waits for the word to go on, so that none is lost or surplus.

    Meanwhile the trial's state may be asked for. ``source`` is the state that it goes on from,
    ``save`` what writes the present one to a path.
    """

    def __init__(self, stream: Any, source: str | None) -> None:
        self._stream = stream
        self.source = source
        self.save: Callable[[str], None] | None = None

    def send(self, event: str, **fields: Any) -> None:
        self._stream.write(json.dumps({"event": event, **fields}).encode() + b"\n")
        self._stream.flush()

    def __call__(self, metrics: Metrics) -> None:
        self.send("report", metrics=metrics)
        while (line := self._stream.readline()) != GO:
            if not line:
                os._exit(0)  # the evaluator is gone
            self._hand_over(json.loads(line)["save"])

    def _hand_over(self, path: str) -> None:
        if self.save is None:
            self.send("unsaved", reason=_NO_STATE)
            return
        try:
            self.save(path)
        except Exception as error:
            self.send("unsaved", reason=_reason(error), details=traceback.format_exc())
        else:
            self.send("saved")


class Context:
    """What a sweep's function gets beside its values.

    ``number``: of the trial, from 1. ``state``: where the trial goes on from another's, or its own
    earlier, state, what was reported with it; None for a fresh start.
    """

    def __init__(self, number: int, report: Reporter) -> None:
        self.number = number
        self.state: Any = None
        self._report = report
        self._last: Metrics = {}
        self._state: Any = None
        if report.source is not None:
            with open(report.source, "rb") as file:
                self._last, self.state = pickle.load(file)

    def report(self, metrics: Metrics, state: Any = None) -> None:
        """Tell how the trial stands; the sweep may end it here. ``step`` counts the reports, unless
        ``metrics`` has one.

        ``state`` is all that the trial would need to go on from here, or a function that returns
        it; it is called only if the state is wanted, as by ``scheduler: pbt``.
        """
        self._last = {"step": self._last.get("step", 0) + 1, **metrics}
        self._state = state
        self._report.save = None if state is None else self._save
        self._report(self._last)

    def _save(self, path: str) -> None:
        state = self._state() if callable(self._state) else self._state
        with open(path, "wb") as file:
            pickle.dump((self._last, state), file, protocol=pickle.HIGHEST_PROTOCOL)

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


def train(base: dict[str, Any], values: dict[str, Any], report: Reporter) -> Metrics:
    """The trial of a sweep over a training job: the training itself, in this process."""
    from ebbtide.train.config import TrainConfig
    from ebbtide.train.handover import Handover
    from ebbtide.train.trial import run_trial
    from ebbtide.tune.space import with_values

    job = with_values(TrainConfig.model_validate(base), values)
    handover = Handover(report.source)
    report.save = handover.save
    return run_trial(job, report, handover=handover)


def _resolve(spec: str) -> Callable[..., Any]:
    module, _, name = spec.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _reason(error: BaseException, memory_bytes: int | None = None) -> str:
    if isinstance(error, SystemExit):
        return f"the trial called sys.exit({error.code!r})"
    if isinstance(error, EbbtideError):
        return str(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        limit = "" if memory_bytes is None else f" (trial_memory_gb is {memory_bytes / 1e9:.2f})"
        return f"out of memory{limit}: {type(error).__name__}"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _enter(request: TrialRequest) -> None:
    """The surroundings that a process of its own, started in the sweep's folder, would have."""
    if request.memory_bytes is not None:
        limit = request.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    os.environ.update(request.environment or {})
    if request.cwd is not None and os.path.isdir(request.cwd):
        os.chdir(request.cwd)
    sys.path.insert(0, os.getcwd())
    random.seed()  # else all children of one zygote would draw alike
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def imported_since(known: int) -> list[str]:
    """Installed modules imported after the first ``known`` ones, in the order of their import.

    The user's own are left out: they may change between two trials. The first ones are not looked
    at: that would make a copy of every page of memory that one of them is on.
    """
    new = list(itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - known)))
    return [
        name
        for name in reversed(new)
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(_INSTALLED)
    ]


def _run(request: TrialRequest, report: Reporter) -> Metrics:
    function = _resolve(request.function)
    if not request.is_user:
        metrics: Metrics = function(request.base, request.values, report)
        return metrics
    context = Context(request.number, report)
    return context.final(function({**request.base, **request.values}, context))


def serve(connection: socket.socket) -> None:
    """Wait for a request, run it, send the outcome. Returns when the child may end."""
    stream = connection.makefile("rwb")
    known = len(sys.modules)
    line = stream.readline()
    if not line:
        return
    request = TrialRequest(**json.loads(line))
    report = Reporter(stream, request.source)
    try:
        _enter(request)
        final = _run(request, report)
        report.send("done", metrics=dict(final), imported=imported_since(known))
    except BaseException as error:  # whatever it is, it is this trial's outcome
        report.send(
            "failed",
            reason=_reason(error, request.memory_bytes),
            details=traceback.format_exc(),
            may_retry=isinstance(error, SystemExit),
        )
