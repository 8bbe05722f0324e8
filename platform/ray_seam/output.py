"""What the workers of a run say, as its driver shows it.

Ray puts a coloured prefix before every line, and holds lines back for seconds to leave out those
that repeat. Promises: lines of our own log are shown at once and as they are, since they say
themselves which rank speaks; all others go Ray's way; nothing is left out but the end
of the log of a node that died, which stays in Ray's own files.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

_RAYS_PRINTER = "ray_print_logs"
_OUR_PRINTER = "ebbtide"
_NODE_DIED, _LOG = "Raylet is terminated.", " Last "
_OURS = re.compile(r"\d\d:\d\d:\d\d (?:debug|info|warning|error|critical)\b")


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """While a driver is connected: our workers' log lines go to stderr without Ray's prefix."""
    printers = dict(dispatcher.handlers)
    if _RAYS_PRINTER not in printers:  # the workers are not to be heard
        yield
        return

    def show(batch: dict[str, Any]) -> None:
        ours, others = split(batch["lines"])
        if ours:
            print(*ours, sep="\n", file=sys.stderr, flush=True)
        if others:
            printers[_RAYS_PRINTER]({**batch, "lines": others})

    dispatcher.remove_handler(_RAYS_PRINTER)
    dispatcher.add_handler(_OUR_PRINTER, show)
    try:
        yield
    finally:
        dispatcher.remove_handler(_OUR_PRINTER)
        dispatcher.add_handler(_RAYS_PRINTER, printers[_RAYS_PRINTER])


def split(lines: list[str]) -> tuple[list[str], list[str]]:
    """Lines of our log, and the others but for empty ones."""
    ours = [line for line in lines if _OURS.match(line)]
    others = [line for line in lines if line.strip() and not _OURS.match(line)]
    return ours, [_without_log(line) for line in others]


def _without_log(message: str) -> str:
    """Ray's message of a node that died ends with the last lines of its log: tens of counters."""
    return message.partition(_LOG)[0] if message.startswith(_NODE_DIED) else message


def mute_training_errors() -> None:
    """In a worker: Ray does not log the training function's exception, as we have judged it."""
    from ray.train.v2._internal import util  # late: a driver needs it for nothing else

    util.logger.setLevel(logging.CRITICAL)
