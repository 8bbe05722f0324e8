"""Errors have the shape that the official client expects."""

from __future__ import annotations

from ebbtide.serve import envelope


def test_body() -> None:
    assert envelope.body(400, "too long", param="prompt") == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": None,
        }
    }
    assert envelope.body(404, "no", code="model_not_found")["error"]["code"] == "model_not_found"
    assert envelope.body(500, "oh")["error"]["type"] == "server_error"
    assert envelope.body(429, "slow")["error"]["type"] == "rate_limit_error"


def test_location_names_the_parameter() -> None:
    assert envelope.location(("body", "stop", 0)) == "stop.0"
    assert envelope.location(("body",)) is None
