"""The evaluator's side of a zygote: start it, get children from it, end them.

Promises: ``child()`` answers as long as a zygote can be started at all (a dead one is replaced); a
killed child takes every process of its group along; nothing started here outlives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbtide.platform.errors import TuneError
from ebbtide.tune.zygote import FORK, HUGE_PAGES, IMPORT

_log = logging.getLogger(__name__)
_LINE_LIMIT_BYTES = 1 << 24  # one JSON line: a report, or the traceback of a failure
_MODULE = "ebbtide.tune.zygote"
WARM_UP = f"{_MODULE}:warm_up"


Exit = asyncio.Future[int | None]
"""Resolves once a child has ended: to its exit code, negative for the signal that killed it, or to
None if its zygote ended first."""


@dataclass
class Child:
    """One forked process and the streams to it."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    exit_code: Exit

    def kill(self) -> None:
        """SIGKILL for the child and its descendants; also right for one that has ended.

        What it has said can be read until :meth:`close`.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self.exit_code.done():  # it may not have made its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the streams."""
        self.writer.close()

    def end(self) -> None:
        """Kill it, whatever it has said."""
        self.kill()
        self.close()


def zygote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One thread a process, and the import path of this one."""
    path = [folder for folder in sys.path if folder]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's, from its import on
        "GLIBC_TUNABLES": environment.get("GLIBC_TUNABLES", HUGE_PAGES),
    }


@dataclass
class _Zygote:
    process: subprocess.Popen[bytes]
    control: socket.socket
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]  # an unused writer would close both
    ready: asyncio.Future[dict[str, Any]]
    forks: asyncio.Queue[tuple[int, Exit] | None] = field(default_factory=asyncio.Queue)
    exits: dict[int, Exit] = field(default_factory=dict)
    imports: asyncio.Queue[int] = field(default_factory=asyncio.Queue)  # threads after each
    listener: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.listener is not None and not self.listener.done()


class Nursery:
    """Children on demand, one always forked ahead. Use from one event loop.

    ``warm_up`` (``module:function``) is what the zygote does once, for all of its children.
    """

    def __init__(self, warm_up: str = WARM_UP) -> None:
        self._warm_up = warm_up
        self._zygote: _Zygote | None = None
        self._spare: Child | None = None
        self._lock = asyncio.Lock()
        self._taught: set[str] = set()
        self._teachable = True
        self._threaded = False  # then no more children are forked from this zygote
        self.zygotes_started = 0

    @property
    def zygote_pid(self) -> int | None:
        return self._zygote.process.pid if self._zygote is not None else None

    async def warm(self) -> dict[str, Any]:
        """Wait until a child is ready to run; what the zygote said of itself. Raises TuneError."""
        async with self._lock:
            zygote = await self._living_zygote()
            if not self._threaded:
                self._spare = await self._usable_spare(zygote)
            return zygote.ready.result()

    async def child(self) -> Child:
        """A fresh child, waiting for its request. Raises TuneError if none can be started.

        Called when no other child runs a trial.
        """
        async with self._lock:
            if self._threaded:
                self.close()
            spare = await self._usable_spare(await self._living_zygote())
            self._spare = None
            return spare

    async def _usable_spare(self, zygote: _Zygote) -> Child:
        if self._spare is None or self._spare.exit_code.done():
            return await self._fork(zygote)
        return self._spare

    async def teach(self, modules: Sequence[str]) -> None:
        """Import what a trial had to import for itself, so that no later one has to."""
        async with self._lock:
            new = [name for name in modules if name not in self._taught]
            if not new or not self._teachable:
                return
            self._taught.update(new)
            zygote = await self._living_zygote()
            with contextlib.suppress(OSError):
                zygote.control.sendall(IMPORT + json.dumps(new).encode() + b"\n")
            if await zygote.imports.get() > 1:
                _log.info("a module that trials import starts threads; each will import its own")
                self._teachable, self._threaded = False, True
            if self._spare is not None:
                self._spare.end()  # it was forked before
                self._spare = None

    def close(self) -> None:
        """End the zygote and with it every child."""
        if self._spare is not None:
            self._spare.end()
            self._spare = None
        if self._zygote is not None:
            self._zygote.process.kill()
            self._zygote.process.wait()
            self._zygote.control.close()
            self._zygote, self._threaded = None, False

    async def _living_zygote(self) -> _Zygote:
        if self._zygote is not None and self._zygote.alive:
            return self._zygote
        if self._zygote is not None:
            _log.warning("the zygote %d has died; starting another", self._zygote.process.pid)
            self.close()
        self._taught.clear()
        self._zygote = await self._start()
        return self._zygote

    async def _start(self) -> _Zygote:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(theirs.fileno()), self._warm_up],
            pass_fds=[theirs.fileno()],
            env=zygote_environment(os.environ),
            stdin=subprocess.DEVNULL,
            process_group=0,  # a Ctrl-C on the terminal is for the driver
        )
        theirs.close()
        self.zygotes_started += 1
        streams = await asyncio.open_connection(sock=ours.dup(), limit=_LINE_LIMIT_BYTES)
        zygote = _Zygote(process, ours, streams, asyncio.get_running_loop().create_future())
        zygote.listener = asyncio.create_task(self._listen(zygote))
        ready = await zygote.ready
        if ready.get("event") != "ready":
            process.kill()
            process.wait()
            raise TuneError(
                f"an evaluator could not warm up: {self._warm_up} ended with exit code "
                f"{process.returncode}; why is in the evaluator's stderr log of Ray"
            )
        if ready["threads"] > 1:
            _log.warning(
                "the zygote runs %d threads; a forked trial may hang on what they hold",
                ready["threads"],
            )
        return zygote

    async def _listen(self, zygote: _Zygote) -> None:
        """Sort the zygote's messages until it ends; then let nobody wait for it."""
        with contextlib.suppress(ConnectionResetError):
            while line := await zygote.streams[0].readline():
                message = json.loads(line)
                if message["event"] == "ready":
                    zygote.ready.set_result(message)
                elif message["event"] == "forked":
                    pid = message["pid"]
                    zygote.exits[pid] = asyncio.get_running_loop().create_future()
                    zygote.forks.put_nowait((pid, zygote.exits[pid]))
                elif message["event"] == "imported":
                    zygote.imports.put_nowait(message["threads"])
                elif (ended := zygote.exits.pop(message["pid"], None)) is not None:
                    ended.set_result(message["code"])
        if not zygote.ready.done():
            zygote.ready.set_result({"event": "ended"})
        zygote.forks.put_nowait(None)
        zygote.imports.put_nowait(0)
        for waiting in zygote.exits.values():
            waiting.set_result(None)
        zygote.exits.clear()

    async def _fork(self, zygote: _Zygote, tries: int = 2) -> Child:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(zygote.control, [FORK], [theirs.fileno()])
        forked = await zygote.forks.get()
        if forked is None:
            ours.close()
            if tries == 1:
                raise TuneError("an evaluator cannot start a trial: its zygote dies at every fork")
            return await self._fork(await self._living_zygote(), tries - 1)
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT_BYTES)
        return Child(forked[0], reader, writer, forked[1])
