"""The metadata services of AWS and GCP on a loopback port: the documented protocol, for tests.

What the instance is told is set through :class:`Instance`, at any moment and from any thread.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from ebbtide.platform.metadata_service import Cloud

_MAX_TTL_S = 6 * 3600


@dataclass
class Instance:
    """What the service says. ``answer`` replaces every answer (status and body) while it is set."""

    cloud: Cloud
    instance_action: str | None = None
    rebalance: str | None = None
    preempted: bool = False
    answer: tuple[int, str] | None = None
    tokens: dict[str, float] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def interrupt(self, action: str, time_text: str) -> None:
        """AWS: give notice."""
        self.instance_action = json.dumps({"action": action, "time": time_text})

    def recommend_rebalance(self, time_text: str) -> None:
        """AWS: recommend to leave."""
        self.rebalance = json.dumps({"noticeTime": time_text})

    def preempt(self) -> None:
        """GCP: give notice; a request that waits for it is answered at once."""
        with self.changed:
            self.preempted = True
            self.changed.notify_all()

    def expire_tokens(self) -> None:
        """AWS: every token that was given has ended."""
        self.tokens.clear()


class LocalMetadata:
    """``with LocalMetadata("aws") as service``: ``service.endpoint`` answers until the end."""

    def __init__(self, cloud: Cloud) -> None:
        self.instance = Instance(cloud)
        instance = self.instance

        class Handler(_Handler):
            told = instance

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> LocalMetadata:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    told: Instance

    def do_PUT(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        self.told.requests.append(f"{self.command} {self.path}")
        if self.told.answer is not None:
            self._answer(*self.told.answer)
        elif self.told.cloud == "aws":
            self._serve_aws()
        else:
            self._serve_gcp()

    def _serve_aws(self) -> None:
        told, now_s = self.told, time.monotonic()
        if self.path == "/latest/api/token":
            ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if self.command != "PUT":
                self._answer(405)
            elif re.fullmatch(r"[0-9]+", ttl) is None or not 1 <= int(ttl) <= _MAX_TTL_S:
                self._answer(400)
            else:
                token = secrets.token_urlsafe(40)
                told.tokens[token] = now_s + int(ttl)
                self._answer(200, token)
            return
        if told.tokens.get(self.headers.get("X-aws-ec2-metadata-token", ""), 0.0) < now_s:
            self._answer(401)
            return
        known = {
            "/latest/meta-data/spot/instance-action": told.instance_action,
            "/latest/meta-data/events/recommendations/rebalance": told.rebalance,
        }
        text = known.get(self.path)
        self._answer(404) if text is None else self._answer(200, text)

    def _serve_gcp(self) -> None:
        path, _, query = self.path.partition("?")
        if self.headers.get("Metadata-Flavor") != "Google":
            self._answer(403)
        elif path != "/computeMetadata/v1/instance/preempted" or self.command != "GET":
            self._answer(404)
        else:
            asked = dict(urllib.parse.parse_qsl(query))
            if asked.get("wait_for_change") == "true":
                self._await_change(asked.get("last_etag"), float(asked.get("timeout_sec", "3600")))
            self._answer(200, "TRUE" if self.told.preempted else "FALSE")

    def _await_change(self, last_etag: str | None, timeout_s: float) -> None:
        with self.told.changed:
            if last_etag in (None, self._etag()):
                before = self._etag()
                self.told.changed.wait_for(lambda: self._etag() != before, timeout_s)

    def _etag(self) -> str:
        return f"{int(self.told.preempted):016x}"

    def _answer(self, status: int, text: str = "") -> None:
        body = text.encode()
        self.send_response(status)
        if self.told.cloud == "gcp" and self.told.answer is None:
            self.send_header("Metadata-Flavor", "Google")
            self.send_header("ETag", self._etag())
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        return None
