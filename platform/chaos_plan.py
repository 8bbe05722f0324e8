"""What is to happen to a cluster's nodes, and when: pure, from a file or from a rate and a seed.

The same plan gives the same events, and picks the same nodes among the same candidates, in the
demo, in tests and in benchmarks.

.. code-block:: yaml

    seed: 7
    replace_after_s: 10
    events:
      - {at_step: 40, do: drain, deadline_s: 30}
      - {at_s: 12.5, do: kill, count: 2}
      - {at_s: 20, do: kill, target: worker}
      - {at_s: 60, do: stop, target: worker, for_s: 20, node: n1}
      - {at_s: 90, do: add}
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from ebbtide.platform.config import Config

Action = Literal["drain", "kill", "stop", "add"]
Target = Literal["node", "worker"]

DEFAULT_MIX: Mapping[Action, float] = {"drain": 6.0, "kill": 3.0, "stop": 1.0}


class Event(Config):
    """One thing that happens, after a step of the run or a time since the start."""

    do: Action = Field(
        description="drain: announce the end of a node, and take it away at the deadline; kill: "
        "SIGKILL; stop: SIGSTOP for a time; add: start a node."
    )
    at_step: int | None = Field(
        default=None, ge=0, description="When the run has finished this step."
    )
    at_s: float | None = Field(default=None, ge=0, description="So many seconds after the start.")
    target: Target = Field(
        default="node",
        description="kill, stop: the whole node, or one of its busy worker processes.",
    )
    named: str | None = Field(
        default=None,
        description="Only a worker whose process title holds this text, as TrainWorker.",
    )
    node: str | None = Field(
        default=None, description="Name of the node (n0, n1, ...); default: drawn."
    )
    count: int = Field(default=1, ge=1, description="How many nodes at once.")
    deadline_s: float = Field(
        default=60.0, ge=0, description="drain: how long after the notice it goes."
    )
    for_s: float = Field(default=20.0, gt=0, description="stop: how long.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        fields = type(self).model_fields
        if (self.at_step is None) == (self.at_s is None):
            raise ValueError("do needs either at_step or at_s")
        for key, actions in (
            ("deadline_s", ("drain",)),
            ("for_s", ("stop",)),
            ("target", ("kill", "stop")),
            ("node", ("drain", "kill", "stop")),
        ):
            if self.do not in actions and getattr(self, key) != fields[key].default:
                raise ValueError(f"{key} has no meaning for {self.do}")
        if self.node is not None and self.count != 1:
            raise ValueError("node names one node; leave count out")
        if self.named is not None and self.target != "worker":
            raise ValueError("named needs target: worker")
        return self


class Plan(Config):
    """Events in any order; each happens once."""

    seed: int = Field(default=0, description="Draws the nodes, and the events of a rate.")
    keep_nodes: int = Field(
        default=1, ge=0, description="What would leave fewer usable nodes is skipped, and told."
    )
    replace_after_s: float | None = Field(
        default=None,
        ge=0,
        description="A node that is gone is replaced so much later; default: never.",
    )
    events: tuple[Event, ...] = ()

    @classmethod
    def at_rate(
        cls,
        per_hour: float,
        duration_s: float,
        *,
        seed: int = 0,
        mix: Mapping[Action, float] = DEFAULT_MIX,
        replace_after_s: float | None = 10.0,
        keep_nodes: int = 1,
    ) -> Self:
        """Independent events, ``per_hour`` on average, of kinds drawn by their weight in ``mix``.

        Nodes are drained and killed, workers stopped. A longer plan of the same seed begins with
        the shorter one.
        """
        draw = random.Random(f"rate/{seed}")
        kinds, weights = list(mix), list(mix.values())
        events, at_s = [], draw.expovariate(per_hour / 3600)
        while at_s < duration_s:
            [kind] = draw.choices(kinds, weights)
            target: Target = "worker" if kind == "stop" else "node"
            events.append(Event(do=kind, at_s=at_s, target=target))
            at_s += draw.expovariate(per_hour / 3600)
        return cls(
            seed=seed,
            keep_nodes=keep_nodes,
            replace_after_s=replace_after_s,
            events=tuple(events),
        )

    @classmethod
    def every(
        cls,
        interval_s: float,
        count: int,
        do: Action = "kill",
        *,
        seed: int = 0,
        replace_after_s: float | None = 10.0,
        keep_nodes: int = 1,
    ) -> Self:
        """The same event ``count`` times, ``interval_s`` apart, the first after one interval."""
        return cls(
            seed=seed,
            keep_nodes=keep_nodes,
            replace_after_s=replace_after_s,
            events=tuple(Event(do=do, at_s=interval_s * (1 + i)) for i in range(count)),
        )

    def due(self, done: Collection[int], elapsed_s: float, step: int | None) -> list[int]:
        """The events (by index, in the file's order) whose moment has come and that are not done.

        ``step`` is the last finished step, None if there is none or no run is watched.
        """
        return [
            index
            for index, event in enumerate(self.events)
            if index not in done
            and (
                (event.at_s is not None and elapsed_s >= event.at_s)
                or (event.at_step is not None and step is not None and step >= event.at_step)
            )
        ]

    def victims(self, index: int, usable: Sequence[str]) -> list[str]:
        """The nodes for an event; empty if its node, or enough nodes, are not to be had."""
        event = self.events[index]
        if event.node is not None:
            return [event.node] if event.node in usable else []
        if event.count > len(usable):
            return []
        return random.Random(f"{self.seed}/{index}").sample(sorted(usable), event.count)

    def spares_enough(self, index: int, usable: int) -> bool:
        """Whether the event leaves :attr:`keep_nodes` of so many usable nodes."""
        event = self.events[index]
        lost = 0 if event.do == "add" or event.target == "worker" else event.count
        return usable - lost >= self.keep_nodes
