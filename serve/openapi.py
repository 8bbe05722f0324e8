"""The description of what is served: that of vLLM's own server, less what is not for clients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Json = dict[str, Any]

_SCHEMAS = "#/components/schemas/"


def public(document: Json, paths: Collection[str], hidden: Collection[str]) -> Json:
    """The same with these paths only, and without the fields ``hidden`` in any request's body.

    Schemas that nothing refers to any more are left out.
    """
    kept = {path: each for path, each in document["paths"].items() if path in paths}
    schemas = {
        name: {
            **each,
            "properties": {k: v for k, v in each["properties"].items() if k not in hidden},
        }
        if "properties" in each
        else each
        for name, each in document.get("components", {}).get("schemas", {}).items()
    }
    used: dict[str, Json] = {}
    waiting = _references(kept)
    while waiting:
        name = waiting.pop()
        if name not in used and name in schemas:
            used[name] = schemas[name]
            waiting |= _references(schemas[name])
    return {
        "openapi": document["openapi"],
        "info": {"title": "ebbtide", "version": "1"},
        "paths": kept,
        "components": {"schemas": dict(sorted(used.items()))},
    }


def _references(value: Any) -> set[str]:
    """The names of the schemas that a part of a description refers to."""
    if isinstance(value, dict):
        reference = value.get("$ref")
        own = {reference.removeprefix(_SCHEMAS)} if isinstance(reference, str) else set()
        return own.union(*(_references(each) for each in value.values()))
    if isinstance(value, list):
        return set[str]().union(*(_references(each) for each in value))
    return set()
