"""JSON lines on storage, appended to by one process and never changed: segments of bounded size.

Objects cannot be appended to, so a flush replaces the newest segment by a longer one. Promises:
a replacement is one atomic put, so a reader sees whole lines; adding never waits for storage (a
daemon thread flushes); a storage fault is logged, and what was refused is written at the next
flush: bookkeeping never ends a run; a killed process takes only what came after its last flush.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from ebbtide.platform.errors import EbbtideError
from ebbtide.platform.storage import Storage

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 256 * 1024


class SegmentWriter:
    """Writes ``<prefix>-<sequence>.jsonl`` under ``storage``. Thread-safe.

    ``name`` is what the lines are, for messages ("ledger"). ``intervals_s`` are the seconds from
    one flush to the next, without end. At each flush ``take`` gives the lines that are new, every
    one with its line feed. ``closing_line`` gives a line that ends the newest segment and is
    replaced at the next flush; with it a segment is written at every flush, without it only when
    there are new lines.
    """

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        *,
        name: str,
        take: Callable[[], bytes],
        intervals_s: Iterable[float],
        closing_line: Callable[[], bytes] | None = None,
    ) -> None:
        self._storage, self._prefix, self._name = storage, prefix, name
        self._take, self._closing_line = take, closing_line
        self._intervals_s = intervals_s
        self._segment, self._sequence, self._unwritten = bytearray(), 0, False
        self._flushing = threading.Lock()
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ebbtide-{name}", daemon=True)
        self._thread.start()

    def flush_soon(self) -> None:
        """Have the thread flush now; returns at once."""
        self._wake.set()

    def flush(self) -> bool:
        """Put everything on storage now; False (and a log line) if the storage refused."""
        with self._flushing:
            lines = self._take()
            self._segment += lines
            self._unwritten = self._unwritten or bool(lines) or self._closing_line is not None
            if not self._unwritten:
                return True
            last = self._closing_line() if self._closing_line is not None else b""
            try:
                self._storage.put(
                    f"{self._prefix}-{self._sequence:06d}.jsonl", bytes(self._segment) + last
                )
            except EbbtideError as error:
                logger.warning("the %s could not be written, will try again: %s", self._name, error)
                return False
            self._unwritten = False
            if len(self._segment) >= _SEGMENT_BYTES:
                self._segment, self._sequence = bytearray(), self._sequence + 1
            return True

    def close(self) -> None:
        """Flush and stop. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        self._thread.join()
        if not self.flush():
            logger.error(
                "the end of the %s is lost; it belongs to %s", self._name, self._storage.uri
            )

    def _run(self) -> None:
        for interval_s in self._intervals_s:
            self._wake.wait(interval_s)
            self._wake.clear()
            if self._closed.is_set():
                return
            self.flush()
