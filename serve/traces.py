"""Requests as spans of OpenTelemetry, sent over OTLP by its own SDK, where an endpoint is given.

Each request is a server span, a child of the ``traceparent`` of its client if it brought one, with
a span for each stage of its way. Promises: a collector that is slow or away holds up no request;
nothing of prompts, answers or keys is in a span but the name of the key; without an endpoint for
traces nothing is imported, and a client's header goes on to engines only if they trace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ebbtide.platform.errors import ConfigError
from ebbtide.serve.stages import Cost

_HEADERS = ("traceparent", "tracestate")
_PATH = "/v1/traces"
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_CLOSE_S = 3.0


def endpoint_of(variables: Mapping[str, str]) -> str | None:
    """Where the standard's variables have traces sent to; None if they do not say.

    Raises ConfigError for a protocol that is not HTTP's.
    """
    whole, base = variables.get(TRACES_VARIABLE), variables.get(ENDPOINT_VARIABLE)
    if not whole and not base:
        return None
    for name in _PROTOCOL_VARIABLES:
        if variables.get(name, _PROTOCOL) != _PROTOCOL:
            raise ConfigError(
                f"{name} is {variables[name]!r}; traces go over {_PROTOCOL} only: give the "
                "collector's port for that (4318 as a rule)"
            )
    return whole or f"{str(base).rstrip('/')}{_PATH}"


class Trace(Protocol):
    """Of one request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What its workers are told."""

    def end(self, cost: Cost, key: str, status: int) -> None:
        """The request has had its answer, or what there was of it."""


class Traces:
    """Begins the trace of each request. ``is_passed_on``: engines send traces themselves."""

    def __init__(self, endpoint: str | None, service: str, is_passed_on: bool) -> None:
        self._is_passed_on = is_passed_on
        self._provider = None if endpoint is None else _provider(endpoint, service)

    def begin(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Trace:
        """A request has come, with these headers of its client."""
        given = {k.decode(): v.decode("latin-1") for k, v in headers if k.decode() in _HEADERS}
        if self._provider is None:
            return _Untraced(given if self._is_passed_on else {})
        return _Traced(self._provider.get_tracer("ebbtide.serve"), path, given, self._is_passed_on)

    def close(self) -> None:
        """Send what has not been sent, but wait for no collector that is away."""
        if self._provider is not None:
            sending = threading.Thread(target=self._provider.shutdown, daemon=True)
            sending.start()
            sending.join(_CLOSE_S)


def _provider(endpoint: str, service: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_NAME: service})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class _Untraced:
    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def end(self, cost: Cost, key: str, status: int) -> None:
        pass


class _Traced:
    """The span of a request, and those of its stages, once it has ended."""

    def __init__(
        self, tracer: Any, path: str, given: Mapping[str, str], is_passed_on: bool
    ) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer, propagator = tracer, TraceContextTextMapPropagator()
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        parent = propagator.extract(given)
        self._span = tracer.start_span(
            f"POST {path}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=self._epoch_ns(time.monotonic()),
        )
        self._context = set_span_in_context(self._span)
        self.headers: dict[str, str] = {}
        if is_passed_on:
            propagator.inject(self.headers, self._context)

    def end(self, cost: Cost, key: str, status: int) -> None:
        from opentelemetry.trace import StatusCode

        for stage in cost.stages:
            span = self._tracer.start_span(
                stage.name,
                context=self._context,
                start_time=self._epoch_ns(stage.start_s),
                attributes={"ebbtide.worker": stage.worker},
            )
            span.end(self._epoch_ns(stage.end_s))
        self._span.set_attributes(
            {
                "http.response.status_code": status,
                "ebbtide.key": key,
                "gen_ai.usage.input_tokens": cost.num_prompt_tokens,
                "gen_ai.usage.output_tokens": cost.num_output_tokens,
            }
        )
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._epoch_ns(time.monotonic()))

    def _epoch_ns(self, monotonic_s: float) -> int:
        return self._offset_ns + int(monotonic_s * 1e9)
