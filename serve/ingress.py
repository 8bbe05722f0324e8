"""The OpenAI-compatible door: Ray's ingress with errors in the API's own envelope.

Promises: whatever a client sends is answered in the envelope, with 400 or 404 where the client is
at fault; no exception's text reaches a client; fields by which workers talk to each other are taken
out of clients' requests. Imports vLLM, so only replicas and the builder import this module.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.llm.ingress import OpenAiIngress, make_fastapi_ingress
from starlette.exceptions import HTTPException
from vllm.exceptions import VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError

from ebbtide.platform.ray_seam.llm import (
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIHTTPException,
)
from ebbtide.serve import envelope

log = logging.getLogger(__name__)

_INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params", "request_id")
_ROUTES = {
    "models": lambda app: app.get("/v1/models"),
    "model_data": lambda app: app.get("/v1/models/{model:path}"),
    "completions": lambda app: app.post("/v1/completions"),
    "chat": lambda app: app.post("/v1/chat/completions"),
}


def without_internal_fields(body: Any) -> Any:
    """A client's request as if it had not set what only workers may set."""
    for name in _INTERNAL_FIELDS:
        if name in body.model_fields_set:
            field = type(body).model_fields[name]
            setattr(body, name, field.get_default(call_default_factory=True))
            body.model_fields_set.discard(name)
    return body


class _ModelNotFound(HTTPException):
    def __init__(self, name: str, served: list[str]) -> None:
        super().__init__(404, f"no model {name!r} here; this endpoint serves {', '.join(served)}")


class Ingress(OpenAiIngress):  # type: ignore[misc]  # Ray ships no types
    """Takes requests to the decode workers and streams their tokens back."""

    def __init__(self, llm_deployments: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(llm_deployments, **kwargs)
        self._served = sorted(llm_deployments)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        return await super().completions(self._accepted(body), request)  # type: ignore[no-any-return]

    async def chat(self, body: ChatCompletionRequest, request: Request) -> Response:
        return await super().chat(self._accepted(body), request)  # type: ignore[no-any-return]

    def _accepted(self, body: Any) -> Any:
        if body.model is not None and body.model not in self._served:
            raise _ModelNotFound(body.model, self._served)
        return without_internal_fields(body)


def build_ingress() -> Any:
    """The ingress as a class for ``serve.deployment``."""
    app = FastAPI(title="ebbtide", docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(OpenAIHTTPException, _refused_by_engine)
    app.add_exception_handler(VLLMClientError, _refused_by_vllm)
    for kind in (RayActorError, RayServeException, EngineDeadError):
        app.add_exception_handler(kind, _unavailable)
    app.add_exception_handler(Exception, _failed)
    return make_fastapi_ingress(Ingress, endpoint_map=_ROUTES, app=app)


def _answer(status: int, message: str, **fields: str | None) -> JSONResponse:
    return JSONResponse(envelope.body(status, message, **fields), status_code=status)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    return _answer(400, str(fault["msg"]), param=envelope.location(tuple(fault["loc"])))


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = "model_not_found" if isinstance(error, _ModelNotFound) else None
    return _answer(error.status_code, error.detail, code=code)


async def _refused_by_engine(request: Request, error: Any) -> JSONResponse:
    if error.status_code >= 500:
        return await _failed(request, error)
    return _answer(error.status_code, error.message)


async def _refused_by_vllm(request: Request, error: Exception) -> JSONResponse:
    return _answer(400, str(error))


async def _unavailable(request: Request, error: Exception) -> JSONResponse:
    log.error("a worker was lost while %s was answered: %s", request.url.path, error)
    return _answer(HTTPStatus.SERVICE_UNAVAILABLE, "a worker was lost; try again in a moment")


async def _failed(request: Request, error: Exception) -> JSONResponse:
    log.error("%s failed", request.url.path, exc_info=error)
    return _answer(
        HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the server's log has the details"
    )
