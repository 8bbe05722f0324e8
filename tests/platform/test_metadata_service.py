"""The clients of the metadata services, against servers that speak the documented protocols."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.errors import MetadataError
from ebbtide.platform.local_metadata import LocalMetadata
from ebbtide.platform.metadata_service import AwsMetadata, GcpMetadata, connect

TOKEN = "PUT /latest/api/token"
ACTION = "GET /latest/meta-data/spot/instance-action"


@pytest.fixture
def aws() -> Iterator[LocalMetadata]:
    with LocalMetadata("aws") as server:
        yield server


@pytest.fixture
def gcp() -> Iterator[LocalMetadata]:
    with LocalMetadata("gcp") as server:
        yield server


def unused_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_aws_says_nothing_until_the_notice(aws: LocalMetadata) -> None:
    client = AwsMetadata(aws.endpoint, FakeClock())
    assert client.interruption(20) is None
    assert client.rebalance() is None
    aws.instance.interrupt("terminate", "2026-03-01T12:02:00Z")
    aws.instance.recommend_rebalance("2026-03-01T12:00:00Z")
    assert client.interruption(20) == '{"action": "terminate", "time": "2026-03-01T12:02:00Z"}'
    assert client.rebalance() == '{"noticeTime": "2026-03-01T12:00:00Z"}'


def test_a_token_is_kept_renewed_before_its_end_and_replaced_when_refused(
    aws: LocalMetadata,
) -> None:
    clock = FakeClock()
    client = AwsMetadata(aws.endpoint, clock)
    for _ in range(3):
        client.interruption(0)
    assert aws.instance.requests == [TOKEN, ACTION, ACTION, ACTION]
    clock.sleep(5.5 * 3600)
    client.interruption(0)
    assert aws.instance.requests[4:] == [TOKEN, ACTION]
    aws.instance.expire_tokens()
    client.interruption(0)
    assert aws.instance.requests[6:] == [ACTION, TOKEN, ACTION]


def test_gcp_answers_a_waiting_request_at_the_moment_of_the_notice(gcp: LocalMetadata) -> None:
    client = GcpMetadata(gcp.endpoint)
    began_s = time.monotonic()
    assert client.interruption(60) is None  # the first only looks
    assert client.interruption(1) is None
    assert time.monotonic() - began_s >= 1
    timer = threading.Timer(0.5, gcp.instance.preempt)
    timer.start()
    assert client.interruption(60) == "TRUE"
    assert time.monotonic() - began_s < 30
    timer.join()


def test_each_cloud_is_told_by_its_own_protocol(aws: LocalMetadata, gcp: LocalMetadata) -> None:
    for server, cloud in ((aws, "aws"), (gcp, "gcp")):
        found = connect("auto", server.endpoint, FakeClock())
        assert found is not None
        assert found.cloud == cloud
    assert connect("auto", unused_endpoint(), FakeClock()) is None
    chosen = connect("aws", unused_endpoint(), FakeClock())
    assert chosen is not None
    assert chosen.cloud == "aws"


def test_a_proxy_is_not_asked(aws: LocalMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, unused_endpoint())
    assert AwsMetadata(aws.endpoint, FakeClock()).interruption(0) is None


@pytest.mark.parametrize(
    "answer", [(200, "not\na token"), (200, ""), (403, ""), (302, ""), (500, "oops")]
)
def test_garbage_is_a_metadata_error(aws: LocalMetadata, answer: tuple[int, str]) -> None:
    aws.instance.answer = answer
    with pytest.raises(MetadataError, match="gives no token"):
        AwsMetadata(aws.endpoint, FakeClock()).interruption(0)
    with pytest.raises(MetadataError, match="not by Google's metadata server"):
        GcpMetadata(aws.endpoint).interruption(0)


def test_a_server_that_is_not_there_or_speaks_no_http_is_a_metadata_error() -> None:
    with pytest.raises(MetadataError, match="Connection refused"):
        AwsMetadata(unused_endpoint(), FakeClock()).interruption(0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"hello\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(MetadataError, match="does not answer"):
            GcpMetadata(f"http://127.0.0.1:{server.getsockname()[1]}").interruption(0)
        thread.join()
