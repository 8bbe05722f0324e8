"""One driver a run: a lock object in the run's storage, kept alive by its holder.

Promises: of two drivers, on one cluster or on two, the second is refused within a few beats and
changes nothing; the lock of a driver that died, and one that cannot be read, is taken over after a
few beats without change, by exactly one of those who wait for it. No clock is compared: a lock is
alive if it changes while it is watched. A holder that stalls for longer than that finds the lock
taken when it wakes, and ends; the commit of checkpoints stays atomic either way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ebbtide.platform.checksums import sha256
from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import AlreadyExists, ClusterError, EbbtideError, NotFound
from ebbtide.platform.storage import Storage

logger = logging.getLogger(__name__)

_KEY = "driver.lock"
_BEAT_S = 3.0
_PATIENCE_BEATS = 4


class _Holder(BaseModel):
    """What a lock says of the driver that holds it."""

    model_config = ConfigDict(strict=True)

    host: str
    machine: str = ""
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    token: str
    beat: int


class RunLock:
    """``with RunLock(storage):`` the run is this driver's. Raises ClusterError if it is taken."""

    def __init__(
        self, run: Storage, clock: Clock | None = None, *, beat_s: float = _BEAT_S
    ) -> None:
        self._run, self._clock, self._beat_s = run, clock or SystemClock(), beat_s
        self._token = uuid.uuid4().hex
        self._beats = 0
        self._released = threading.Event()
        self._lost_to: str | None = None
        self._thread = threading.Thread(target=self._keep, name="ebbtide-lock", daemon=True)

    def __enter__(self) -> RunLock:
        self._hold(_KEY)
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
            if self._is_mine(self._read(_KEY)):
                self._run.delete(_KEY)
        except EbbtideError as fault:
            logger.warning("the run's lock could not be removed: %s", fault)

    def check(self) -> None:
        """Raise ClusterError if another driver has taken the run over meanwhile."""
        if self._lost_to is not None:
            raise ClusterError(
                f"{self._run.uri}: this driver stalled and the run was taken over by another one "
                f"({self._lost_to}); leave the run to that one, or stop it and submit again"
            )

    def watched(self, act: Callable[[], None]) -> Callable[[], None]:
        """``act`` after a :meth:`check`."""

        def checked() -> None:
            self.check()
            act()

        return checked

    def _hold(self, key: str) -> None:
        """Put our content at ``key``, if need be in place of a holder that died.

        Who may replace a dead holder is settled by a claim, an object that is named after what the
        dead one left and is held the same way: a claimant can die, too.
        """
        while True:
            try:
                self._run.put(key, self._content(), if_absent=True)
                return
            except AlreadyExists:
                if self._is_mine(self._read(key)):
                    return  # the answer was lost, and the client repeated the put
                left = self._await_death(key)
            if left is None:
                continue
            claim = f"{_KEY}.claim-{sha256(left)[:32]}"
            self._hold(claim)
            try:
                if self._read(key) == left:  # else another claimant was faster
                    logger.warning("%s: the driver before is gone; taking over", self._run.uri)
                    self._run.put(key, self._content())
                    return
            finally:
                self._run.delete(claim)

    def _await_death(self, key: str) -> bytes | None:
        """What a holder that does not beat has left; None if it let go. Else ClusterError."""
        seen = self._read(key)
        for _ in range(_PATIENCE_BEATS):
            if seen is None or _is_dead_here(seen):
                break
            self._clock.sleep(self._beat_s)
            now = self._read(key)
            if now is None:
                return None
            if now != seen:
                raise ClusterError(
                    f"{self._run.uri}: this run is being trained by another driver "
                    f"({_named(now)}); wait for it, stop it, or give this job another name"
                )
        return seen

    def _read(self, key: str) -> bytes | None:
        try:
            return self._run.get(key)
        except NotFound:
            return None

    def _content(self) -> bytes:
        holder = _Holder(
            host=socket.gethostname(),
            machine=_this_machine(),
            pid=os.getpid(),
            token=self._token,
            beat=self._beats,
        )
        return holder.model_dump_json().encode()

    def _is_mine(self, content: bytes | None) -> bool:
        holder = _parsed(content) if content is not None else None
        return holder is not None and holder.token == self._token

    def _keep(self) -> None:
        while self._lost_to is None and not self._released.wait(self._beat_s):
            try:
                self._beat()
            except EbbtideError as error:
                logger.warning("the run's lock could not be kept alive: %s", error)

    def _beat(self) -> None:
        """Change the lock, or put it back if it was removed, or see that it is another's."""
        found = self._read(_KEY)
        if found is not None and not self._is_mine(found):
            self._lost_to = _named(found)
            return
        self._beats += 1
        with contextlib.suppress(AlreadyExists):  # the next beat sees whose it is
            self._run.put(_KEY, self._content(), if_absent=found is None)


def _parsed(content: bytes) -> _Holder | None:
    try:
        return _Holder.model_validate_json(content)
    except ValidationError:
        return None


def _named(content: bytes) -> str:
    holder = _parsed(content)
    return f"process {holder.pid} on {holder.host}" if holder else f"its {_KEY} cannot be read"


def _this_machine() -> str:
    """What processes that see each other's numbers share: one boot of a kernel, one set of numbers.

    Containers may have the same host name. Empty where the kernel does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _is_dead_here(content: bytes) -> bool:
    """Whether the holder was a process of this machine that is no more."""
    holder = _parsed(content)
    if holder is None or not holder.machine or holder.machine != _this_machine():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
