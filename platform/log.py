"""Logging, configured once at the entry of a process.

A human line goes to stderr; where a path is given, the same event goes to a JSON-lines file with
the context (run, attempt, rank, step) that :func:`bind` has set for this process. Modules use
``logging.getLogger(__name__)`` and pass event fields as ``extra={"event": {...}}``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

_context: dict[str, Any] = {}


def bind(**fields: Any) -> None:
    """Set context fields (run, attempt, rank, step, ...) for every later line of this process."""
    _context.update(fields)


class _Stderr(logging.StreamHandler[TextIO]):
    """To whatever ``sys.stderr`` is at the time: a progress bar puts its own in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        rank = _context.get("rank")
        who = "" if rank is None else f" rank {rank}"
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{at} {record.levelname.lower()}{who} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event: Mapping[str, Any] = getattr(record, "event", {})
        return json.dumps(
            {
                "time": record.created,
                "level": record.levelname,
                "logger": record.name,
                "message": record.getMessage(),
                **_context,
                **event,
            },
            default=str,
        )


def configure(level: int = logging.INFO, jsonl: Path | None = None) -> None:
    """Install the handlers on ebbtide's logger. Calling it again replaces them."""
    logger = logging.getLogger("ebbtide")
    logger.setLevel(level)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    human = _Stderr(sys.stderr)
    human.setFormatter(_Human())
    logger.addHandler(human)
    if jsonl is not None:
        jsonl.parent.mkdir(parents=True, exist_ok=True)
        lines = logging.FileHandler(jsonl)
        lines.setFormatter(_JsonLines())
        logger.addHandler(lines)
