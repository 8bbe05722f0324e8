"""A real HTTP server in front of a real S3 server, which spoils some of what passes through it.

Rules say what happens to which requests: an error status, a delay, a connection that is reset
before or after the server behind has done its work, an answer that is cut off. The ``Host`` header
is passed on as it came, as the client's signature covers it.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from ebbtide.platform.local_s3 import LocalS3

Deed = Literal["status", "delay", "reset", "lose", "truncate"]


@dataclass
class Rule:
    """What is done to requests whose ``METHOD /path?query`` the pattern is found in.

    ``status``: ``status`` and ``code`` are the answer, nothing reaches the server. ``delay``: the
    request waits. ``reset``: the connection is. ``lose``: the server does it, and the connection is
    reset before the answer. ``truncate``: half of the answer's body arrives. ``share`` of the
    requests are hit, the first ``times`` of these.
    """

    deed: Deed
    pattern: str = ""
    share: float = 1.0
    times: int | None = None
    status: int = 503
    code: str = "SlowDown"
    delay_s: float = 0.0
    hits: int = field(default=0, init=False)

    def hit(self, request: str, draw: float) -> bool:
        if not re.search(self.pattern, request) or draw >= self.share:
            return False
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


COMPLETE = r"^POST .*[?&]uploadId="
"""A CompleteMultipartUpload."""


class FaultyS3:
    """``with FaultyS3(server) as proxy``: the environment of ``proxy`` leads through it."""

    def __init__(self, behind: LocalS3, seed: int = 0) -> None:
        self.behind, self.bucket = behind, behind.bucket
        self.seen: list[str] = []
        self.most_at_once = self._at_once = 0
        self._rules: Sequence[Rule] = ()
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.proxy = self  # type: ignore[attr-defined]  # the handler's way back here
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> FaultyS3:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def environment(self) -> dict[str, str]:
        """The standard AWS variables that lead a client here."""
        endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {**self.behind.environment, "AWS_ENDPOINT_URL": endpoint}

    def set(self, *rules: Rule) -> None:
        """From now on these rules hold, the first that fits; and nothing was seen so far."""
        with self._lock:
            self._rules = rules
            self.seen, self.most_at_once = [], self._at_once

    def rule_for(self, request: str) -> Rule | None:
        with self._lock:
            self.seen.append(request)
            draw = self._random.random()
            return next((rule for rule in self._rules if rule.hit(request, draw)), None)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Count how many requests are at work at once."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy: FaultyS3 = self.server.proxy  # type: ignore[attr-defined]
        with proxy.at_work():
            self._do(proxy, body)

    def _do(self, proxy: FaultyS3, body: bytes) -> None:
        rule = proxy.rule_for(f"{self.command} {self.path}")
        deed = rule.deed if rule is not None else None
        if rule is not None and deed == "delay":
            time.sleep(rule.delay_s)
        if deed == "reset":
            self._reset()
        elif rule is not None and deed == "status":
            text = f"<Error><Code>{rule.code}</Code><Message>says the test</Message></Error>"
            self._answer(rule.status, [("Content-Type", "application/xml")], text.encode())
        else:
            status, headers, answer = self._forward(proxy.behind.endpoint, body)
            if deed == "lose":
                self._reset()
            else:
                self._answer(status, headers, answer, is_cut=deed == "truncate")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def _forward(self, endpoint: str, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        address = endpoint.removeprefix("http://")
        with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _answer(
        self, status: int, headers: Sequence[tuple[str, str]], body: bytes, is_cut: bool = False
    ) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
        if is_cut:
            self.wfile.flush()
            self.close_connection = True

    def _reset(self) -> None:
        """Have the kernel send a reset instead of an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client has gone
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().finish()

    def log_message(self, *_: object) -> None:
        """Nothing: the proxy keeps what it has seen."""


@contextlib.contextmanager
def outage(proxy: FaultyS3) -> Iterator[None]:
    """Nothing answers meanwhile."""
    proxy.set(Rule("reset"))
    yield
    proxy.set()
