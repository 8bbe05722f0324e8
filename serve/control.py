"""How a command asks an endpoint that runs on the same machine for something: a Unix socket.

Only the user who runs the endpoint can: the sockets lie in a folder of that user alone. Each side
says a line of JSON at a time: the endpoint who it is, the command what it wants, the endpoint how
far that is, and its end. Promises: one request at a time, and none besides until that has ended,
also if its command has gone; a command that goes away is noticed, and what it wanted not begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import socket
import socketserver
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ebbtide.platform.errors import EbbtideError, ServeError
from ebbtide.serve.config import ServeConfig

Json = dict[str, Any]

_ANSWER_S = 10.0
_LOOK_S = 0.2
_MOST_BYTES = 2**16
"""Of what a command wants."""
_TEMPORARY, _SESSIONS = Path("/tmp"), Path("/run/user")
"""Where Linux has temporary files, and systemd the sessions of users, if no variable says another:
there an endpoint is that has another ``XDG_RUNTIME_DIR`` or ``TMPDIR`` than the command."""


def _places() -> list[Path]:
    """Where this user's endpoints may be asked, first where one of this process would be."""
    user, base = str(os.getuid()), os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(base, "ebbtide")] if base else []
    found += [Path(each, f"ebbtide-{user}") for each in (tempfile.gettempdir(), _TEMPORARY)]
    return list(dict.fromkeys([*found, _SESSIONS / user / "ebbtide"]))


def folder() -> Path:
    """Where the sockets of this user's endpoints are. Raises ServeError if others could be there,
    too, or nobody can."""
    path = _places()[0]
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        what = error.strerror or error
        text = f"{path}: {what}; give XDG_RUNTIME_DIR a directory of yours, or unset it"
        raise ServeError(text) from error
    if not _is_ours_alone(found):
        raise ServeError(f"{path}: is not a directory of yours alone (mode 0700); remove it")
    return path


def _is_ours_alone(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


class Ask:
    """What a command wants, until it is answered."""

    def __init__(self, wanted: Json) -> None:
        self.wanted = wanted
        self._lines: queue.SimpleQueue[Json] = queue.SimpleQueue()
        self._is_gone = threading.Event()
        self.is_over = False
        """Whether the endpoint has done with it."""

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._is_gone.is_set()

    def say(self, text: str) -> None:
        """Tell how far it is."""
        self._lines.put({"say": text})

    def done(self, text: str) -> None:
        """Tell that it is done."""
        self.is_over = True
        self._lines.put({"done": text})

    def failed(self, error: EbbtideError) -> None:
        """Tell why it is not."""
        self.is_over = True
        self._lines.put({"error": str(error), "exit_code": error.exit_code})

    def tell(self, connection: socket.socket, write: Any) -> None:
        """Send what is said, up to the end or until the command goes away. For the server."""
        try:
            while True:
                try:
                    line = self._lines.get(timeout=_LOOK_S)
                except queue.Empty:
                    readable, _, _ = select.select([connection], [], [], 0)
                    if readable and not connection.recv(1):
                        return
                    continue
                write(line)
                if "say" not in line:
                    return
        except OSError:
            return
        finally:
            self._is_gone.set()


class Control:
    """The endpoint's side; a context. Raises ServeError or OSError if there can be no socket; that
    of another endpoint which lives is left alone."""

    def __init__(self, config: ServeConfig) -> None:
        self._asked: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self._taking = threading.Lock()
        self._last: Ask | None = None
        port = urlsplit(config.endpoint).port
        self._path = folder() / f"{config.name}-{port}.sock"
        hello = {"name": config.name, "endpoint": config.endpoint}
        control = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                control._handle(self.connection, self.rfile, self._write, hello)

            def _write(self, line: Json) -> None:
                self.wfile.write(json.dumps(line).encode() + b"\n")

        if _lives(self._path):
            raise ServeError(f"{self._path}: an endpoint of this name and port is asked there")
        self._path.unlink(missing_ok=True)  # of one that was killed
        self._server = _Server(str(self._path), Handler)
        self._own = self._path.stat()

    def __enter__(self) -> Control:
        threading.Thread(target=self._server.serve_forever, name="control", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        with contextlib.suppress(OSError):
            if os.path.samestat(self._path.stat(), self._own):
                self._path.unlink()

    def next(self) -> Ask | None:
        """The request that is to be answered, if there is one. It is under way until it is said to
        be done or failed."""
        with contextlib.suppress(queue.Empty):
            asked = self._asked.get_nowait()
            if not asked.is_gone:
                return asked
            asked.failed(ServeError("who asked for it has gone"))
        return None

    def _handle(self, connection: socket.socket, lines: Any, write: Any, hello: Json) -> None:
        with contextlib.suppress(OSError):
            write(hello)
            if not (line := lines.readline(_MOST_BYTES)):
                return
            if (wanted := _wanted(line)) is None:
                return write(_refusal("not understood: is it another version?"))  # type: ignore[no-any-return]
            if (asked := self._taken(wanted)) is None:
                return write(_refusal("another update is under way"))  # type: ignore[no-any-return]
            asked.tell(connection, write)

    def _taken(self, wanted: Json) -> Ask | None:
        """The request, if it is to be answered; None while another one is."""
        with self._taking:
            if self._last is not None and not self._last.is_over:
                return None
            self._last = Ask(wanted)
            self._asked.put(self._last)
            return self._last


def _refusal(text: str) -> Json:
    return {"error": text, "exit_code": ServeError.exit_code}


def _wanted(line: bytes) -> Json | None:
    """What a command's line says, if it is a request."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("update"), str) else None


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False


def _lives(path: Path) -> bool:
    """Whether somebody listens at a socket. Raises OSError if that cannot be told."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[Any]:
    """Lines to and from the endpoint at a socket. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(path))
        with connection.makefile("rwb") as lines:
            yield connection, lines


def running() -> dict[Path, Json]:
    """The endpoints of this user on this machine, by socket: ``name`` and ``endpoint``."""
    found, seen = {}, set()
    for place in _places():
        with contextlib.suppress(OSError):
            status = place.lstat()
            if not _is_ours_alone(status) or (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            for path in sorted(place.glob("*.sock")):
                with contextlib.suppress(OSError, ValueError), _connected(path) as (_, lines):
                    found[path] = json.loads(lines.readline())
    return found


def choose(found: dict[Path, Json], which: str | None) -> Path:
    """The endpoint that is meant by its name or URL, or the only one. Raises ServeError."""
    known = ", ".join(f"{each['name']} ({each['endpoint']})" for each in found.values())
    if not found:
        raise ServeError(
            "no endpoint of yours runs on this machine, as far as can be seen in"
            f" {', '.join(map(str, _places()))}; run this beside `serve FILE`, with its"
            " XDG_RUNTIME_DIR (or, without one, its TMPDIR)"
        )
    meant = [
        path
        for path, each in found.items()
        if which is None or which.rstrip("/") in (each["name"], each["endpoint"])
    ]
    if not meant:
        raise ServeError(f"no endpoint {which} runs on this machine; there is {known}")
    if len(meant) > 1:
        raise ServeError(f"which endpoint? give one's name or URL: {known}")
    return meant[0]


def ask(path: Path, wanted: Json) -> Iterator[str]:
    """Have an endpoint do something; yields how far it is, at last that it is done.

    Raises ServeError with the endpoint's own words and exit code, or if it ends meanwhile.
    """
    try:
        with _connected(path) as (connection, lines):
            lines.readline()
            lines.write(json.dumps(wanted).encode() + b"\n")
            lines.flush()
            connection.settimeout(None)
            for line in lines:
                told = json.loads(line)
                if "error" in told:
                    error = ServeError(told["error"])
                    error.exit_code = told["exit_code"]
                    raise error
                yield told.get("say") or told["done"]
                if "done" in told:
                    return
    except OSError as error:
        raise ServeError(f"the endpoint does not answer: {error}") from error
    raise ServeError("the endpoint ended before the update did")
