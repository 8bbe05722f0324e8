"""Requests become spans at a collector, and go on with the traces of their clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from ebbtide.platform.errors import ConfigError
from ebbtide.serve.traces import Traces, endpoint_of
from tests.serve.small_endpoint import small_endpoint
from tests.serve.stand_in import StandIn, says

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
LONG = "x" * 400 + ">"


class Collector(ThreadingHTTPServer):
    """What takes OTLP over HTTP, by the protocol's own messages."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[ExportTraceServiceRequest] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for each in self.received
            for of_resource in each.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        assert self.headers["content-type"] == "application/x-protobuf"
        assert isinstance(self.server, Collector)
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


async def asked(traces: Traces, headers: dict[str, str], **body: Any) -> tuple[list[Any], str]:
    """The workers of an endpoint after one streamed request; and its text."""
    workers = [StandIn(), StandIn()]
    async with small_endpoint(workers[:1], workers[1:], traces=traces) as endpoint:
        endpoint.session.headers.update(headers)
        answer = await endpoint.ask(prompt=LONG, max_tokens=20, stream=True, **body)
        return workers, answer.text


def test_a_request_is_a_span_with_its_stages_in_its_clients_trace(collector: Collector) -> None:
    traces = Traces(collector.url, "tide", is_passed_on=True)
    (decode, prefill), text = asyncio.run(asked(traces, {"traceparent": TRACEPARENT}))
    assert text == says(20)
    traces.close()
    spans = {span.name: span for span in collector.spans}
    assert list(spans) == ["queue", "prefill", "transfer", "decode", "POST /v1/completions"]
    whole = spans.pop("POST /v1/completions")
    assert whole.trace_id.hex() == TRACE and whole.parent_span_id.hex() == PARENT
    said = attributes(whole)
    assert (said["http.response.status_code"], said["ebbtide.key"]) == (200, "anyone")
    assert said["gen_ai.usage.input_tokens"] == len(LONG)
    assert said["gen_ai.usage.output_tokens"] == 20
    ends = whole.start_time_unix_nano
    for span in spans.values():
        assert span.parent_span_id == whole.span_id and span.trace_id == whole.trace_id
        assert ends <= span.start_time_unix_nano + 1_000, "one after the other"
        ends = span.end_time_unix_nano
    assert ends <= whole.end_time_unix_nano + 1_000
    for worker in (prefill, decode):
        (sent,) = worker.headers
        assert re.fullmatch(f"00-{TRACE}-{whole.span_id.hex()}-01", sent["traceparent"])
    told = str(collector.received)
    assert LONG not in told and text not in told
    (resource,) = {str(each.resource_spans[0].resource) for each in collector.received}
    assert "tide" in resource


def test_without_a_header_a_trace_begins_here(collector: Collector) -> None:
    traces = Traces(collector.url, "tide", is_passed_on=False)
    workers, _ = asyncio.run(asked(traces, {}))
    traces.close()
    (whole,) = (span for span in collector.spans if span.name.startswith("POST"))
    assert not whole.parent_span_id and any(whole.trace_id)
    assert not any("traceparent" in sent for worker in workers for sent in worker.headers)


def test_what_is_refused_says_so(collector: Collector) -> None:
    async def main() -> None:
        worker = StandIn(refuse=(400, "no"))
        async with small_endpoint([worker], traces=traces) as endpoint:
            assert (await endpoint.ask(prompt="go>")).status == 400

    traces = Traces(collector.url, "tide", is_passed_on=False)
    asyncio.run(main())
    traces.close()
    (whole,) = (span for span in collector.spans if span.name.startswith("POST"))
    assert attributes(whole)["http.response.status_code"] == 400


@pytest.mark.parametrize(("is_passed_on", "expected"), [(True, TRACEPARENT), (False, None)])
def test_untraced_a_clients_header_goes_on_to_engines_that_trace(
    is_passed_on: bool, expected: str | None
) -> None:
    workers, _ = asyncio.run(
        asked(Traces(None, "tide", is_passed_on), {"traceparent": TRACEPARENT})
    )
    assert [sent.get("traceparent") for worker in workers for sent in worker.headers] == (
        [expected] * 2
    )


def test_a_collector_that_is_away_holds_up_no_request() -> None:
    traces = Traces("http://127.0.0.1:9/v1/traces", "tide", is_passed_on=False)
    _, text = asyncio.run(asked(traces, {}))
    assert text == says(20)
    traces.close()


def test_the_standards_variables_are_read() -> None:
    assert endpoint_of({}) is None
    base = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}
    assert endpoint_of(base) == "http://c:4318/v1/traces"
    both = {**base, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}
    assert endpoint_of(both) == "http://t/x"
    with pytest.raises(ConfigError, match=r"'grpc'; traces go over http/protobuf only"):
        endpoint_of({**base, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert endpoint_of({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) is None
