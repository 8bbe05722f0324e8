"""What a worker's refusal means."""

from __future__ import annotations

import pytest
from pydantic_core import to_json

from ebbtide.serve import envelope
from ebbtide.serve.worker_client import Lost, Refused, _refused


@pytest.mark.parametrize("code", [None, 400, "wrong"])
def test_a_fault_of_the_request_is_told_whatever_its_code(code: object) -> None:
    body = envelope.body(400, "too long", param="prompt")
    body["error"]["code"] = code
    found = _refused(400, to_json(body))
    assert isinstance(found, Refused) and found.status == 400
    assert found.body["error"]["message"] == "too long"
    assert found.body["error"]["param"] == "prompt"


@pytest.mark.parametrize("status", [403, 429, 500, 503])
@pytest.mark.parametrize("body", [b"", b"[]", to_json(envelope.body(500, "CUDA error"))])
def test_other_faults_are_the_workers(status: int, body: bytes) -> None:
    found = _refused(status, body)
    assert isinstance(found, Lost) and found.spoke
