"""What is told of the served API is what clients may use of it."""

from __future__ import annotations

from ebbtide.serve.openapi import public

_DOCUMENT = {
    "openapi": "3.1.0",
    "info": {"title": "vLLM"},
    "paths": {
        "/v1/completions": {"post": {"requestBody": {"$ref": "#/components/schemas/Asked"}}},
        "/collective_rpc": {"post": {"requestBody": {"$ref": "#/components/schemas/Call"}}},
    },
    "components": {
        "schemas": {
            "Asked": {
                "properties": {
                    "prompt": {"anyOf": [{"$ref": "#/components/schemas/Prompt"}]},
                    "kv_transfer_params": {"$ref": "#/components/schemas/Transfer"},
                }
            },
            "Prompt": {"type": "string"},
            "Transfer": {"type": "object"},
            "Call": {"type": "object"},
        }
    },
}


def test_only_what_is_for_clients_is_told() -> None:
    found = public(_DOCUMENT, ["/v1/completions", "/v1/models"], ["kv_transfer_params"])
    assert list(found["paths"]) == ["/v1/completions"]
    assert list(found["components"]["schemas"]) == ["Asked", "Prompt"]
    assert list(found["components"]["schemas"]["Asked"]["properties"]) == ["prompt"]
    assert "kv_transfer_params" in str(_DOCUMENT), "changed in place"
