"""One driver a run: a lock object in the run's storage, kept alive by its holder.

Promises: of two drivers, on one cluster or on two, the second is refused within a few beats and
changes nothing; the lock of a driver that died is taken over after a few beats without change. No
clock is compared: a lock is alive if it changes while it is watched. (A holder that stalls for
longer than that is not fenced off; the commit of checkpoints stays atomic either way.)
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import uuid
from types import TracebackType

from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import AlreadyExists, ClusterError, EbbtideError, NotFound
from ebbtide.platform.storage import Storage

logger = logging.getLogger(__name__)

_KEY = "driver.lock"
_BEAT_S = 3.0
_PATIENCE_BEATS = 4


class RunLock:
    """``with RunLock(storage):`` the run is this driver's. Raises ClusterError if it is taken."""

    def __init__(
        self, run: Storage, clock: Clock | None = None, *, beat_s: float = _BEAT_S
    ) -> None:
        self._run, self._clock, self._beat_s = run, clock or SystemClock(), beat_s
        self._token = uuid.uuid4().hex
        self._beats = 0
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="ebbtide-lock", daemon=True)

    def __enter__(self) -> RunLock:
        self._acquire()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._released.set()
        self._thread.join()
        try:
            if self._is_mine():
                self._run.delete(_KEY)
        except EbbtideError as fault:
            logger.warning("the run's lock could not be removed: %s", fault)

    def _acquire(self) -> None:
        while True:
            try:
                self._run.put(_KEY, self._content(), if_absent=True)
                return
            except AlreadyExists:
                self._await_death()

    def _await_death(self) -> None:
        """Remove the lock that is there if it does not change for a while, else ClusterError."""
        seen = self._read()
        for _ in range(_PATIENCE_BEATS):
            if seen is None or _is_dead_here(seen):
                break
            self._clock.sleep(self._beat_s)
            if (now := self._read()) is not None and now != seen:
                holder = json.loads(now)
                raise ClusterError(
                    f"{self._run.uri}: this run is being trained by another driver (process "
                    f"{holder['pid']} on {holder['host']}); wait for it, stop it, or give this "
                    "job another name"
                )
        else:
            logger.warning("%s: the driver before is gone; taking the run over", self._run.uri)
        self._run.delete(_KEY)

    def _read(self) -> bytes | None:
        try:
            return self._run.get(_KEY)
        except NotFound:
            return None

    def _content(self) -> bytes:
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "token": self._token}
        return json.dumps({**holder, "beat": self._beats}).encode()

    def _is_mine(self) -> bool:
        content = self._read()
        return content is not None and json.loads(content)["token"] == self._token

    def _keep(self) -> None:
        while not self._released.wait(self._beat_s):
            self._beats += 1
            try:
                self._run.put(_KEY, self._content())
            except EbbtideError as error:
                logger.warning("the run's lock could not be kept alive: %s", error)


def _is_dead_here(content: bytes) -> bool:
    """Whether the holder was a process of this host that is no more."""
    holder = json.loads(content)
    if holder["host"] != socket.gethostname():
        return False
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
