"""The workers of one model in Ray Serve: an application a role, started, watched, scaled and ended.

An endpoint has one such *generation* of workers, and for a while two when its model is replaced.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import ServeError
from ebbtide.serve import startup
from ebbtide.serve.builder import Builder
from ebbtide.serve.config import Role, ServeConfig
from ebbtide.serve.engine import Site, application_names
from ebbtide.serve.routers import Routers

log = logging.getLogger(__name__)

Pause = Callable[[float], None]
"""Sleeps so many seconds, and raises what ends the waiting."""
Say = Callable[[str], None]
"""Tells people how far something is."""

_POLL_S = 1.0
_BEAT_S = 0.2
_SAY_EVERY_S = 10.0
_END_S = 60.0
"""Ray Serve kills a replica that has not ended 20 s after it was told to."""


@dataclass(frozen=True)
class Workers:
    """One generation's workers. Every method raises ServeError when Ray Serve is gone.

    ``look`` is called every second while a process that builds applications is waited for, and may
    raise what ends that.
    """

    config: ServeConfig
    site: Site
    look: Callable[[], None] = lambda: None

    @property
    def generation(self) -> int:
        """Which model of the endpoint this is, counted from 1."""
        return self.site.generation

    @property
    def names(self) -> dict[Role, str]:
        """The applications' names."""
        return application_names(self.config, self.generation)

    def scale(self, counts: Mapping[Role, int], builder: Builder | None = None) -> None:
        """Have so many workers of each role from now on; does not wait for them.

        ``builder`` is one of theirs, if it is there already. Raises ConfigError for what vLLM
        refuses.
        """
        from ebbtide.platform.ray_seam.serve import scale

        found, names = _applications(self.config), self.names
        new = {r: n for r, n in counts.items() if n and names[r] not in found}
        if new and builder is not None:
            builder.run(new)
        elif new:
            with Builder(self.config, self.site, self.look) as own:
                own.run(new)
        with _answering(self.config):
            for role, number in counts.items():
                if names[role] in found:
                    scale(names[role], number)

    def progress(self, roles: Mapping[Role, int] | None = None) -> startup.Progress:
        """How far they are, those of all roles or of the ones that there are some of."""
        found = _applications(self.config)
        wanted = [role for role in self.names if roles is None or roles.get(role)]
        return startup.together([startup.progress(found.get(self.names[r])) for r in wanted])

    def await_ready(
        self,
        counts: Mapping[Role, int],
        routers: Routers,
        deadline_s: float,
        clock: Clock,
        pause: Pause,
        say: Say,
    ) -> None:
        """Until so many workers run, and the routers have heard of all. Raises ServeError."""
        name = self.config.name
        began_s = said_s = clock.monotonic()
        while True:
            now = self.progress(counts)
            if now.state == "running" and _has(routers.ready(self.generation), counts):
                return
            if now.state == "failed":
                raise ServeError(f"{name} could not be started: {now.text}")
            if clock.monotonic() > deadline_s:
                raise ServeError(
                    f"{name} is not up after start_timeout_s ({self.config.start_timeout_s:g} s): "
                    f"{now.text}"
                )
            if clock.monotonic() - said_s >= _SAY_EVERY_S:
                said_s = clock.monotonic()
                say(f"starting for {said_s - began_s:.0f} s: {now.text}")
            pause(_BEAT_S if now.state == "running" else _POLL_S)

    def retire(self, routers: Routers, drain_s: float, clock: Clock, pause: Pause, say: Say) -> int:
        """End them, when what they have begun has ended, or after ``drain_s`` s; returns how many
        requests had not. New requests are led elsewhere already."""
        number = self.generation
        deadline_s, said = clock.monotonic() + drain_s, -1
        while left := routers.num_at_work(number):
            if clock.monotonic() > deadline_s:
                break
            if said != left:
                say(f"{left} requests still end at the model before")
                said = left
            pause(_POLL_S)
        self._end(clock, pause)
        return left

    def _end(self, clock: Clock, pause: Pause) -> None:
        from ebbtide.platform.ray_seam.serve import end_applications

        deadline_s = clock.monotonic() + _END_S
        with _answering(self.config):
            end_applications(set(self.names.values()) & set(_applications(self.config)))
        while set(self.names.values()) & set(_applications(self.config)):
            if clock.monotonic() > deadline_s:
                log.warning("%s: its workers have not ended within %.0f s", self.names, _END_S)
                return
            pause(_POLL_S)


def _has(ready: Mapping[Role, int], counts: Mapping[Role, int]) -> bool:
    return all(ready[role] >= number for role, number in counts.items())


def _applications(config: ServeConfig) -> Mapping[str, Any]:
    from ray import serve

    with _answering(config):
        found: Mapping[str, Any] = serve.status().applications
        return found


@contextlib.contextmanager
def _answering(config: ServeConfig) -> Iterator[None]:
    """Calls of Ray Serve. Raises ServeError."""
    import ray
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (ray.exceptions.RayError, RayServeException) as error:
        raise ServeError(f"{config.name}: Ray Serve does not answer any more: {error}") from error
