"""What a cloud tells an instance about its own end: the metadata services of AWS and GCP.

Promises: a request goes to the instance's link-local service directly (never through a proxy, never
along a redirect) and ends within seconds; whatever goes wrong is a MetadataError with the reason.
AWS: IMDSv2 with its session token, which is kept, renewed before it ends, and replaced when it is
refused. GCP: one long-polling request, answered at the moment of the notice.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any, Literal, Protocol

from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import MetadataError

Cloud = Literal["aws", "gcp"]

DEFAULT_ENDPOINT = "http://169.254.169.254"  # of both

_TIMEOUT_S = 2.0
_MAX_BYTES = 64 * 1024
_TOKEN_TTL_S = 6 * 3600  # the longest that AWS gives
_TOKEN_RENEWAL_S = 5 * 3600
_TOKEN_PATH = "/latest/api/token"
_INSTANCE_ACTION_PATH = "/latest/meta-data/spot/instance-action"
_REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
_PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
_GOOGLE = {"Metadata-Flavor": "Google"}


class MetadataService(Protocol):
    """One cloud's service. What it says is handed on as text, uninterpreted."""

    cloud: Cloud

    def interruption(self, wait_s: float) -> str | None:
        """The notice of this instance's end, None while there is none. May wait up to ``wait_s``
        for one. Raises MetadataError."""

    def rebalance(self) -> str | None:
        """The recommendation to leave this instance, None while there is none.

        Raises MetadataError."""


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Message
    text: str


class _StayHere(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        return None


class _Http:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _StayHere())

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        timeout_s: float = _TIMEOUT_S,
    ) -> _Answer:
        url = f"{self.endpoint}{path}"
        try:
            request = urllib.request.Request(url, headers=dict(headers), method=method)
            with self._opener.open(request, timeout=timeout_s) as answer:
                return _Answer(answer.status, answer.headers, _text(answer.read(_MAX_BYTES)))
        except urllib.error.HTTPError as error:
            with error:
                return _Answer(error.code, error.headers, "")
        except urllib.error.URLError as error:
            raise MetadataError(f"{url} does not answer: {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MetadataError(f"{url} does not answer: {error!r}") from error


def _text(body: bytes) -> str:
    return body.decode("utf-8", errors="replace").strip()


class AwsMetadata:
    """EC2's IMDSv2. See "Spot Instance interruption notices" in the EC2 user guide."""

    cloud: Cloud = "aws"

    def __init__(self, endpoint: str, clock: Clock) -> None:
        self._http, self._clock = _Http(endpoint), clock
        self._token, self._renew_at_s = "", 0.0

    def interruption(self, wait_s: float) -> str | None:
        return self._get(_INSTANCE_ACTION_PATH)

    def rebalance(self) -> str | None:
        return self._get(_REBALANCE_PATH)

    def token(self) -> str:
        """The session token, a new one if there is none or the one there is nears its end."""
        if not self._token or self._clock.monotonic() >= self._renew_at_s:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            answer = self._http.ask(_TOKEN_PATH, ttl, method="PUT")
            token = answer.text
            if answer.status != 200 or not (token.isascii() and token.isprintable() and token):
                raise MetadataError(
                    f"{self._http.endpoint}{_TOKEN_PATH} gives no token: HTTP {answer.status}"
                )
            self._token, self._renew_at_s = token, self._clock.monotonic() + _TOKEN_RENEWAL_S
        return self._token

    def _get(self, path: str) -> str | None:
        answer = self._http.ask(path, {"X-aws-ec2-metadata-token": self.token()})
        if answer.status == 401:  # it has ended before its time
            self._token = ""
            answer = self._http.ask(path, {"X-aws-ec2-metadata-token": self.token()})
        if answer.status == 404:
            return None
        if answer.status != 200:
            self._token = ""
            raise MetadataError(f"{self._http.endpoint}{path}: HTTP {answer.status}")
        return answer.text


class GcpMetadata:
    """Compute Engine's metadata server. See "Spot VMs" and "Querying metadata" in its manual."""

    cloud: Cloud = "gcp"

    def __init__(self, endpoint: str) -> None:
        self._http = _Http(endpoint)
        self._etag = ""

    def interruption(self, wait_s: float) -> str | None:
        """``TRUE``, or None for ``FALSE``; the first call only looks."""
        path, timeout_s = _PREEMPTED_PATH, _TIMEOUT_S
        if wait_s > 0 and self._etag:
            wait = {"wait_for_change": "true", "timeout_sec": f"{wait_s:.0f}"}
            path += "?" + urllib.parse.urlencode({**wait, "last_etag": self._etag})
            timeout_s += wait_s
        self._etag, answer = "", self._http.ask(path, _GOOGLE, timeout_s=timeout_s)
        where = f"{self._http.endpoint}{_PREEMPTED_PATH}"
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise MetadataError(f"{where}: HTTP {answer.status}, not by Google's metadata server")
        if answer.status != 200:
            raise MetadataError(f"{where}: HTTP {answer.status}")
        self._etag = answer.headers.get("ETag", "")
        return None if answer.text.upper() == "FALSE" else answer.text

    def rebalance(self) -> str | None:
        """GCP recommends nothing of the kind."""
        return None


def connect(
    cloud: Literal["auto", "aws", "gcp"], endpoint: str, clock: Clock
) -> MetadataService | None:
    """The service of ``cloud``; with ``auto``, of whichever cloud answers, None if none does."""
    aws, gcp = AwsMetadata(endpoint, clock), GcpMetadata(endpoint)
    if cloud != "auto":
        return aws if cloud == "aws" else gcp
    try:
        gcp.interruption(0)
        return gcp
    except MetadataError:
        pass  # neither cloud answers the other's first request
    try:
        aws.token()
        return aws
    except MetadataError:
        return None
