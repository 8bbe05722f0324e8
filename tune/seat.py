"""One place of a pool: an evaluator, and the CPUs that a sweep reserves for it.

Promises: what was reserved and is not used is let go; an evaluator is given up for its node's sake
only once there are CPUs for it on another.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

_NODE_LABEL = "ray.io/node-id"
_STUCK_S = 5.0


def name_of(index: int) -> str:
    """Of the evaluator at this place."""
    return f"evaluator-{index}"


@dataclass
class Seat:
    """One evaluator and the CPUs reserved for it.

    An evaluator that exists is joined, then CPUs are reserved on its node. For one that does not,
    CPUs are reserved anywhere, and it is started and joined there. ``joining`` is the pending call
    for the lease. ``warm_s`` is what its evaluator took to become warm. ``unordered`` are calls to
    it that later ones have to come after. ``elsewhere`` is a second reservation, on any node, while
    the evaluator's is kept busy by others.
    """

    index: int
    actor: Any = None
    joining: Any = None
    joined: bool = False
    group: PlacementGroup | None = None
    group_ready: bool = False
    group_asked_at_s: float = 0.0
    elsewhere: PlacementGroup | None = None
    node_id: str | None = None
    warm_s: float = 0.0
    retry_at_s: float = 0.0
    busy: bool = False
    busy_since_s: float = 0.0
    unordered: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.index)

    @property
    def ready(self) -> bool:
        return self.joined and self.group_ready

    @property
    def free(self) -> bool:
        return self.ready and not self.busy

    def reserve(self, cpus: float, node_id: str | None) -> None:
        """Ask for CPUs, on one node or on any; an earlier reservation is let go."""
        self.unreserve()
        where = [{_NODE_LABEL: node_id}] if node_id is not None else None
        self.group = placement_group([{"CPU": cpus}], bundle_label_selector=where)
        self.group_asked_at_s = time.monotonic()

    def unreserve(self) -> None:
        """Let the CPUs go."""
        if self.group is not None:
            remove_placement_group(self.group)
        self.group, self.group_ready = None, False
        self._drop_elsewhere()

    def look_for_cpus(self, cpus: float) -> bool:
        """Whether what was asked for is there by now.

        Where others keep the evaluator's node busy CPUs are asked for on any node, too, and what
        comes first is taken: they may be on another node than the evaluator then.
        """
        assert self.group is not None
        if self.group.wait(0.001):
            self.group_ready = True
            self._drop_elsewhere()
        elif self.joined and time.monotonic() - self.group_asked_at_s >= _STUCK_S:
            self.elsewhere = self.elsewhere or placement_group([{"CPU": cpus}])
            if self.elsewhere.wait(0.001):
                remove_placement_group(self.group)
                self.group, self.elsewhere, self.group_ready = self.elsewhere, None, True
        return self.group_ready

    def reserved_node(self) -> str | None:
        """Where the CPUs are; None as long as there are none."""
        if self.group is None or not self.group_ready:
            return None
        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        return nodes.get(0) or None

    def _drop_elsewhere(self) -> None:
        if self.elsewhere is not None:
            remove_placement_group(self.elsewhere)
            self.elsewhere = None
