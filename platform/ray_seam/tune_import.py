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
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_NAMED = {
    "pandas": "DataFrame",
    "ray.data": "Dataset",
    "requests": None,
    "jsonschema": None,
    "filelock": "FileLock",
    "rich": None,
    "rich.layout": None,
    "rich.live": None,
}
"""What is left out, and of each the class that is named: in annotations, or kept for later."""

_SWITCH_S = 0.0005
"""The other thread, which mostly waits for answers, would go on 5 ms after each of them."""
_lock = threading.RLock()


class _StandIn(ModuleType):
    """A module that is imported when something is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks, and takes no for an answer
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


def _real(name: str) -> ModuleType:
    """The module itself, in the place of its stand-in."""
    with _lock:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
        return importlib.import_module(name)


def _stand_in(name: str, named: str | None) -> ModuleType:
    module = _StandIn(name)
    if named is not None:
        setattr(module, named, _class(name, named))
    return module


def _class(module: str, name: str) -> type:
    """Stands for a class of a module; called, it makes one of the real."""

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        return getattr(_real(module), name)(*args, **kwargs)

    return type(name, (), {"__new__": make})


def _is_needless(name: str) -> bool:
    """Whether a module can be left out: neither it is there, nor what it is a part of (but Ray)."""
    parent = name.rpartition(".")[0]
    return name not in sys.modules and (parent not in _NAMED or parent not in sys.modules)


@contextlib.contextmanager
def _standing_in() -> Iterator[None]:
    """Inside, what is not imported yet is not imported."""
    placed = {name: _stand_in(name, named) for name, named in _NAMED.items() if _is_needless(name)}
    for name, module in placed.items():
        parent, _, last = name.rpartition(".")
        if parent in placed:
            setattr(placed[parent], last, module)
    sys.modules.update(placed)
    try:
        yield
    finally:
        with _lock:
            for name, module in placed.items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]
                parent, _, last = name.rpartition(".")
                if parent in sys.modules and vars(sys.modules[parent]).get(last) is module:
                    delattr(sys.modules[parent], last)
                if (named := _NAMED[name]) is not None and named in vars(module):
                    delattr(module, named)  # from now on it is the real one


@contextlib.contextmanager
def importing_tune(using: str) -> Iterator[Callable[[], None]]:
    """Inside, Ray Tune is imported in a thread; yields what waits for that.

    However it is left, no stand-in is in anybody's way afterwards.
    """
    importing = threading.Thread(target=import_tune, args=[using], daemon=True)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    importing.start()

    def join() -> None:
        importing.join()
        sys.setswitchinterval(interval_s)

    try:
        yield join
    finally:
        join()


def import_tune(using: str) -> None:
    """Import Ray, Ray Tune and the module ``using`` it. May run in a thread."""
    with _standing_in():
        importlib.import_module("ray.tune")
        importlib.import_module("ray.tune.tune")
    importlib.import_module(using)
