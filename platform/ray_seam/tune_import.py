"""Ray Tune, imported without what the driver of a sweep does not use.

Ray imports pandas and Ray Data with Ray Tune, to name their classes in annotations, and a few
libraries for rare ways; together they take longer than all the rest. Here stand-ins are in their
place while Ray Tune is imported. Promises: afterwards whoever imports one of them gets the module
itself, and a stand-in that was kept hands over what is asked of it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_NAMED = {"pandas": "DataFrame", "ray.data": "Dataset", "requests": None, "jsonschema": None}
"""What is left out, and of each the class that annotations name."""

_lock = threading.RLock()


class _StandIn(ModuleType):
    """A module that is imported when something is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks, and takes no for an answer
            raise AttributeError(name)
        with _lock:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
            return getattr(importlib.import_module(self.__name__), name)


def _stand_in(name: str, named: str | None) -> ModuleType:
    module = _StandIn(name)
    if named is not None:
        setattr(module, named, type(named, (), {}))
    return module


@contextlib.contextmanager
def _standing_in() -> Iterator[None]:
    """Inside, what is not imported yet is not imported."""
    placed = {
        name: _stand_in(name, named) for name, named in _NAMED.items() if name not in sys.modules
    }
    sys.modules.update(placed)
    try:
        yield
    finally:
        with _lock:
            for name, module in placed.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
                parent, _, last = name.rpartition(".")
                if parent and vars(sys.modules[parent]).get(last) is module:
                    delattr(sys.modules[parent], last)
                if (named := _NAMED[name]) is not None and named in vars(module):
                    delattr(module, named)  # from now on it is the real one


def import_tune(using: str) -> None:
    """Import Ray, Ray Tune and the module ``using`` it. May run in a thread."""
    with _standing_in():
        importlib.import_module("ray.tune")
        importlib.import_module("ray.tune.tune")
    importlib.import_module(using)


@contextlib.contextmanager
def without_datasets() -> Iterator[None]:
    """Inside, Ray Tune's snapshots need no Ray Data; without datasets in them it has no part in
    them."""
    import ray

    if "ray.data" in sys.modules:
        yield
        return
    stand_in = _stand_in("ray.data", "Dataset")
    setattr(ray, "data", stand_in)  # noqa: B010  (mypy knows no such attribute)
    try:
        yield
    finally:
        if vars(ray).get("data") is stand_in:
            delattr(ray, "data")
