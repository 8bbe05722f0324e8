"""Ray Train's group of ranks, placed on nodes that are named, without a placement group.

Ray's GCS tries a placement group again with growing pauses until what the ranks before have held is
free, half a second and more; their room on the nodes is seen within a tenth of one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
from ray._private.state import available_resources_per_node
from ray._raylet import RAY_NODE_ID_KEY  # type: ignore[attr-defined]  # compiled
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    PlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_ROOM_POLL_S = 0.02
_START_TIMEOUT_S = 120.0
"""For processes to start. Nothing is reserved, so somebody else may have taken the room that was
seen; then, or when an environment takes longer to build, the next try is a placement group's."""


def selector_of(nodes: Sequence[str]) -> dict[str, str]:
    """How a callback of Ray's controller names the node of each rank, in any order; a selector of
    labels that Ray understands as "one of these nodes"."""
    return {RAY_NODE_ID_KEY: f"in({','.join(nodes)})"}


def nodes_of(selectors: Sequence[Mapping[str, str]] | None) -> list[str]:
    """The nodes in what :func:`selector_of` has made; none in other selectors."""
    if not selectors or set(selectors[0]) != {RAY_NODE_ID_KEY}:
        return []
    text = selectors[0][RAY_NODE_ID_KEY]
    return text.removeprefix("in(").removesuffix(")").split(",")


@dataclass(frozen=True)
class Rooms(PlacementGroupHandle):  # type: ignore[misc]  # untyped base
    """Stands where Ray Train has a placement group: room for a rank on each of these nodes."""

    nodes: tuple[str, ...]
    resources: Mapping[str, float]

    @property
    def placement_group(self) -> Rooms:
        return self

    def ready(self) -> Any:
        raise NotImplementedError("nothing is reserved")

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Whether all have had room within that time."""
        ends_s = time.monotonic() + timeout_seconds
        while not self.is_there(available_resources_per_node()):
            if time.monotonic() > ends_s:
                return False
            time.sleep(_ROOM_POLL_S)
        return True

    def is_there(self, free: Mapping[str, Mapping[str, float]]) -> bool:
        """Whether these free resources, by node, are enough."""
        return all(
            round(free.get(node, {}).get(name, 0.0), 4) >= round(ranks * amount, 4)  # Ray's unit
            for node, ranks in Counter(self.nodes).items()
            for name, amount in self.resources.items()
        )

    def shutdown(self) -> None:
        """Nothing is held but by the ranks."""


class PlacedGroup(WorkerGroup):  # type: ignore[misc]  # untyped base
    """Has its ranks on the nodes that :func:`selector_of` has named; else placed by Ray."""

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        nodes = nodes_of(worker_group_context.label_selector)
        if len(nodes) != worker_group_context.num_workers:
            return super()._create_placement_group(scaling_config, worker_group_context)
        return Rooms(tuple(nodes), worker_group_context.resources_per_worker)

    def _create_workers(
        self,
        num_workers: int,
        placement_group: Any,
        resources_per_worker: dict[str, float],
        *arguments: Any,
        **named: Any,
    ) -> list[Worker]:
        if not isinstance(placement_group, Rooms):
            return super()._create_workers(  # type: ignore[no-any-return]  # untyped base
                num_workers, placement_group, resources_per_worker, *arguments, **named
            )
        environment = self._train_run_context.run_config.worker_runtime_env
        kind = ray.remote(
            runtime_env=self._get_worker_runtime_env(custom_runtime_env=environment),
            **bundle_to_remote_args(resources_per_worker),
        )(self._worker_cls)
        there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in placement_group.nodes]
        actors = [kind.options(scheduling_strategy=node).remote() for node in there]
        try:
            found = ray.get(
                [actor.get_metadata.remote() for actor in actors], timeout=_START_TIMEOUT_S
            )
        except ray.exceptions.RayError as error:  # a node is gone, or somebody else took its room
            for actor in actors:
                ray.kill(actor)
            raise WorkerGroupStartupFailedError(f"a rank did not start: {error}") from error
        workers = [
            Worker(actor, metadata, resources_per_worker, placement_group_bundle_index=index)
            for index, (actor, metadata) in enumerate(zip(actors, found, strict=True))
        ]
        return self._assign_worker_ranks(workers)  # type: ignore[no-any-return]  # untyped base
