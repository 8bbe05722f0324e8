"""Errors in the OpenAI API's own envelope: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an answer with a status of 400 or more."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def location(parts: tuple[int | str, ...]) -> str | None:
    """The parameter that a validation error is about: ``("body", "stop", 0)`` -> ``stop.0``."""
    return ".".join(str(part) for part in parts if part != "body") or None
