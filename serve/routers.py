"""The two routers of an endpoint, asked as one: either may be dead, and back in a moment.

Promises: what new requests are led to is noted in the cluster before any router is told, so that
one which is started again knows it; :meth:`Routers.lead` returns when both do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from ebbtide.platform.errors import ServeError
from ebbtide.serve import cluster
from ebbtide.serve.config import Role, ServeConfig
from ebbtide.serve.router_actor import open_note
from ebbtide.serve.scaling import Known

_ANSWER_S = 10.0
_BACK_S = 60.0
_WARM_UP_TIMEOUT_S = 60.0
_BEAT_S = 0.2


class Routers:
    """The router actors of one endpoint, the first of which was the first to serve."""

    def __init__(self, config: ServeConfig, actors: Iterable[Any]) -> None:
        self._config, self._actors = config, list(actors)

    def ready(self, generation: int) -> dict[Role, int]:
        """How many workers of each role every router that lives has heard of; of one that does not
        answer just now that is not known, so none."""
        roles: tuple[Role, ...] = ("prefill", "decode")
        unknown = dict.fromkeys(roles, 0)
        found = [each for _, each in _answers(self._actors, "ready", generation, silent=unknown)]
        return {role: min((each[role] for each in found), default=0) for role in roles}

    def lead(self, generations: Iterable[int], pause: Callable[[float], None]) -> None:
        """Have both lead new requests to workers of these; ``pause`` sleeps. Raises ServeError."""
        from ebbtide.platform.ray_seam.serve import note

        wanted = sorted(generations)
        note(open_note(self._config), " ".join(map(str, wanted)))
        deadline_s = time.monotonic() + _BACK_S
        while len(list(self._answers("lead", wanted))) < len(self._actors):
            if time.monotonic() > deadline_s:
                raise ServeError(f"{self._config.name}: a router is gone, and does not come back")
            pause(_BEAT_S)

    def num_at_work(self, generation: int) -> int:
        """How many requests workers of a generation have begun; those of a dead router broke.

        A router that does not answer just now may have some, and counts as one.
        """
        answers = _answers(self._actors, "num_at_work", generation, silent=1)
        return sum(each for _, each in answers)

    def warm_up(self, generation: int) -> None:
        """Requests through all roles of a generation: they make their connections, and show that
        they work. Raises ServeError with what the workers said."""
        what = f"{self._config.name}: the first request failed"
        actor = next((actor for actor, _ in self._answers("listens")), self._actors[0])
        cluster.answer_of(actor.warm_up.remote(generation), what, _WARM_UP_TIMEOUT_S)

    def known(self) -> Known | None:
        """What the router that has the port knows; None where none answers just now."""
        listening = [actor for actor, listens in self._answers("listens") if listens]
        found = list(_answers(listening, "known"))
        return found[0][1] if found else None

    def prefills(self) -> dict[str, int]:
        """How many prompts were computed where."""
        found = [each for _, each in self._answers("prefills")]
        return {where: sum(each[where] for each in found) for where in ("local", "remote")}

    def _answers(self, method: str, *arguments: Any) -> Iterable[tuple[Any, Any]]:
        return _answers(self._actors, method, *arguments)


def _answers(
    actors: list[Any], method: str, *arguments: Any, silent: Any = None
) -> Iterable[tuple[Any, Any]]:
    """Actor and answer of each that answers, or ``silent`` of one that does not though it is not
    known to be dead."""
    import ray

    asked = [(actor, getattr(actor, method).remote(*arguments)) for actor in actors]
    for actor, answer in asked:
        try:
            yield actor, ray.get(answer, timeout=_ANSWER_S)
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.ActorDiedError:
            continue
        except ray.exceptions.RayError:  # too slow, or being started again
            if silent is not None:
                yield actor, silent
