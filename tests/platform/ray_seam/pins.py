"""Checks of what is used of Ray, which fail with what has changed and where it is used.

Tests import neither Ray's private modules nor those of the seam that need them: one that cannot be
imported would end the collection, and say nothing of the others.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray


class Pins:
    """What a module of the seam uses. Every method raises AssertionError."""

    def __init__(self, module: str) -> None:
        self._module = f"ebbtide.platform.ray_seam.{module}"
        self._where = f"Ray {ray.__version__}: see platform/ray_seam/{module}.py"

    def own(self, name: str) -> Any:
        """The thing of this name in the module itself."""
        return self.find(f"{self._module}:{name}")

    def find(self, path: str) -> Any:
        """The thing at ``package.module:Class.method``."""
        module, _, names = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
        except ImportError as error:
            raise AssertionError(f"{module} cannot be used: {error}; {self._where}") from error
        for name in filter(None, names.split(".")):
            if not hasattr(found, name):
                raise AssertionError(f"{module} has no {names}; {self._where}")
            found = getattr(found, name)
        return found

    def takes(self, path: str, *parameters: str, others: bool = True) -> None:
        """The function at ``path`` has these parameters; ``others``: it may have more."""
        known = list(inspect.signature(self.find(path)).parameters)
        fits = set(parameters) <= set(known) if others else list(parameters) == known
        assert fits, f"{path} takes {known}, not {list(parameters)}; {self._where}"

    def says(self, path: str, *texts: str) -> None:
        """The source of the thing at ``path`` contains these; a whole module is not imported."""
        source = inspect.getsource(self.find(path)) if ":" in path else self._source(path)
        for text in texts:
            assert text in source, f"{path} has no {text!r} any more; {self._where}"

    def _source(self, module: str) -> str:
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin, f"there is no {module}; {self._where}"
        return Path(found.origin).read_text(encoding="utf-8")

    def knows(self, known: Iterable[str], wanted: Iterable[str], of: str) -> None:
        """All that is wanted is known."""
        missing = set(wanted) - set(known)
        assert not missing, f"{of} has no {', '.join(sorted(missing))}; {self._where}"
