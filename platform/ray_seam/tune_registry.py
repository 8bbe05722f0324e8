"""Ray Tune's register of what it can run, asked once a sweep instead of five times a trial.

Each question is a call to the cluster's control service, and all of them are about the one class
that every trial of a sweep has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class _Remembering:
    """A register in front of Ray's. What is registered here is asked anew."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self._found: dict[tuple[str, str], Any] = {}

    def register(self, category: str, key: str, value: Any) -> None:
        self._found.pop((category, key), None)
        self._registry.register(category, key, value)

    def contains(self, category: str, key: str) -> bool:
        return (category, key) in self._found or bool(self._registry.contains(category, key))

    def get(self, category: str, key: str) -> Any:
        if (category, key) not in self._found:
            self._found[category, key] = self._registry.get(category, key)
        return self._found[category, key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Inside, Ray Tune remembers what is registered."""
    import ray.tune.registry

    original = ray.tune.registry._global_registry
    ray.tune.registry._global_registry = _Remembering(original)
    try:
        yield
    finally:
        ray.tune.registry._global_registry = original
