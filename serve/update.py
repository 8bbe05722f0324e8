"""A running endpoint gets another model: its workers start, requests move, the old ones end.

Promises: requests are answered all the time; a model that does not load, or one that is not wanted
any more before the first request was led to it, leaves the old model serving with all its workers;
what a worker has begun ends at workers of the same model, for which it has ``drain_s``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import ClusterError, ServeError
from ebbtide.serve import capacity, cluster, rollout
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import Site, demand, num_ports, side_channel_ports
from ebbtide.serve.routers import Routers
from ebbtide.serve.workers import Pause, Say, Workers

log = logging.getLogger(__name__)

_UNWANTED = "who asked for another one has gone"


def next_site(config: ServeConfig, before: Site, first_port: int, generation: int) -> Site:
    """The site of the workers that follow those at ``before``.

    Two generations live at once at the most, so they have the two halves of the ports in turn.
    """
    ports = side_channel_ports(config, first_port)
    if ports == before.side_channel_ports:
        ports = side_channel_ports(config, first_port + num_ports(config))
    return replace(before, side_channel_ports=ports, generation=generation)


@dataclass
class Update:
    """The way from the workers of one model, of which there are ``counts``, to ``wanted`` ones of
    the next.

    ``is_wanted`` is asked before anything is begun and until requests are led to the new
    model; ``pause`` sleeps.
    """

    old: Workers
    new: Workers
    counts: rollout.Counts
    wanted: rollout.Counts
    routers: Routers
    clock: Clock
    pause: Pause
    say: Say
    is_wanted: Callable[[], bool] = lambda: True
    is_taken: bool = False
    """Whether new requests are led to the new workers."""
    _is_retired: bool = False

    def run(self) -> None:
        """Go all of it. Raises ServeError or ClusterError, which say which model serves on."""
        if not self.is_wanted():
            raise ServeError(f"the old model serves on: {_UNWANTED}")
        plan = self._plan()
        if plan[0].old != self.counts:
            self.say("no room for the workers of both models at once: one follows the other")
        before = rollout.Step(self.counts, dict.fromkeys(self.new.config.roles, 0))
        try:
            for step in plan:
                self._take(before, step)
                before = step
            self._retire()
        except Exception as error:  # whatever it is, the endpoint serves on
            if self._is_retired:
                text = f"the new model serves, but with fewer workers: {error}"
                raise ServeError(text) from error
            text = f"{self._undo()}, as the new one was not taken: {error}"
            raise ServeError(text) from error

    def _plan(self) -> list[rollout.Step]:
        nodes, old, new = cluster.nodes(), self.old.config, self.new.config

        def short(left: rollout.Counts, there: rollout.Counts) -> str | None:
            return capacity.shortfall([*demand(old, left), *demand(new, there)], nodes)

        found = rollout.steps(self.counts, self.wanted, lambda left, there: not short(left, there))
        if not found:
            raise ClusterError(
                "the old model serves on, as there is no room for a worker of the new one beside"
                f" its last one: {short(self.counts, self.wanted)}; add nodes, or lower the roles'"
                " cpus or gpus and start the endpoint anew"
            )
        return found

    def _take(self, before: rollout.Step, step: rollout.Step) -> None:
        if step.new != before.new:
            self._start(step.new)
            if not self.is_taken:
                self.routers.warm_up(self.new.generation)
                is_whole = step.new == self.wanted
                both = {self.old.generation, self.new.generation}
                self._lead({self.new.generation} if is_whole else both)
        elif any(step.old.values()):
            self.old.scale(step.old)
        else:
            self._retire()

    def _start(self, counts: rollout.Counts) -> None:
        deadline_s = self.clock.monotonic() + self.new.config.start_timeout_s
        self.new.scale(counts)
        self.new.await_ready(
            counts, self.routers, deadline_s, self.clock, self._pause_if_wanted, self.say
        )

    def _pause_if_wanted(self, seconds: float) -> None:
        if not self.is_taken and not self.is_wanted():
            raise ServeError(_UNWANTED)
        self.pause(seconds)

    def _lead(self, generations: set[int]) -> None:
        self.routers.lead(generations, self.pause)
        if not self.is_taken:
            self.say("requests are led to the new model")
        self.is_taken = True

    def _retire(self) -> None:
        if self._is_retired:
            return
        self._lead({self.new.generation})
        drain_s = self.old.config.drain_s
        left = self.old.retire(self.routers, drain_s, self.clock, self.pause, self.say)
        if left:
            self.say(f"{left} requests had not ended after drain_s ({drain_s:g} s), and broke off")
        self._is_retired = True

    def _undo(self) -> str:
        """All as it was before, each part of which is tried; returns whether the old model serves,
        and what could not be done."""
        drain_s, left, serves = self.old.config.drain_s, list[str](), True
        back: list[tuple[Callable[[], object], bool, str]] = [
            (
                lambda: self.routers.lead({self.old.generation}, self.pause),
                True,
                "not every router leads requests to it again",
            ),
            (
                lambda: self.new.retire(self.routers, drain_s, self.clock, self.pause, self.say),
                False,
                "the new model's workers may not have ended",
            ),
            (lambda: self.old.scale(self.counts), True, "it may have fewer workers, or none"),
        ]
        self.is_taken = False
        for part, is_needed, otherwise in back:
            try:
                part()
            except Exception as error:  # whatever it is, the rest is to be done
                log.exception("%s: an update could not be undone", self.old.config.name)
                left.append(f"{otherwise} ({error})")
                serves = serves and not is_needed
        state = "the old model serves on" if serves else "the old model is back, but not whole"
        return "; ".join([state, *left])
