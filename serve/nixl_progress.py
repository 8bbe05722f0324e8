"""NIXL's progress thread, made to wait for what it is there for.

The thread waits for events of UCX, but no longer than its delay, which NIXL's Python agent sets to
zero, so that every engine burns a whole core. There is no public option; this module replaces the
one call that makes the agent. Seen in NIXL 1.3.2; a test fails when a release changes it.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

log = logging.getLogger(__name__)

DELAY_US = 100_000
"""After which the thread looks by itself. Events wake it at once; what it costs that there was none
is bounded by this, and at 1000 it was 1.5% of a core for every engine, at 20,000 0.3%."""


class _PatientBindings:
    """NIXL's native module, but agents wait for events, for ``delay_us`` microseconds at most."""

    def __init__(self, bindings: Any, delay_us: int) -> None:
        self._bindings, self._delay_us = bindings, delay_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802  # NIXL's own name
        config.pthrDelay = self._delay_us
        return self._bindings.nixlAgent(name, config)


def install(delay_us: int = DELAY_US) -> bool:
    """Make agents that are created from now on wait for events; once per process.

    False, with a warning, if NIXL is not what it was: transfers work, but each engine burns a core.
    """
    try:
        api = importlib.import_module("nixl._api")
        found = api.nixlBind
        if isinstance(found, _PatientBindings):
            return True
        found.nixlAgentConfig().pthrDelay = delay_us  # raises if there is no such field
        getattr(found, "nixlAgent")  # noqa: B009  # raises if it is called otherwise now
    except (ImportError, AttributeError) as error:
        log.warning("NIXL's progress thread cannot be slowed, it will burn a core: %s", error)
        return False
    setattr(api, "nixlBind", _PatientBindings(found, delay_us))  # noqa: B010  # untyped module
    return True
