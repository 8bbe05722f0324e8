"""Ray Train's group can be placed on named nodes; with real ranks in ``tests/train``."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.platform.ray_seam.pins import Pins

PINS = Pins("train_group")
GROUP = "ray.train.v2._internal.execution.worker_group.worker_group"


def test_the_group_places_and_starts_its_ranks_through_two_methods() -> None:
    PINS.takes(
        f"{GROUP}:WorkerGroup._create_placement_group",
        "self",
        "scaling_config",
        "worker_group_context",
        others=False,
    )
    PINS.takes(
        f"{GROUP}:WorkerGroup._create_workers",
        "self",
        "num_workers",
        "placement_group",
        "resources_per_worker",
    )
    PINS.says(
        f"{GROUP}:WorkerGroup._start_impl",
        "pg_handle.wait(self._worker_group_start_timeout_s)",
        "pg_handle.placement_group,",
    )
    PINS.says(
        f"{GROUP}:WorkerGroup._create_workers",
        "self._get_worker_runtime_env(",
        "bundle_to_remote_args(resources_per_worker)",
        "actor.get_metadata.remote()",
        "WorkerGroup._assign_worker_ranks(",
    )
    PINS.says(
        "ray.train.v2._internal.execution.controller.controller",
        "worker_group_cls = WorkerGroup",
        "self.worker_group_cls.create(",
    )


def test_nodes_are_named_by_a_selector_of_labels() -> None:
    selector = PINS.own("selector_of")(["a", "a", "b"])
    nodes_of = PINS.own("nodes_of")
    assert nodes_of([selector] * 3) == ["a", "a", "b"]
    assert nodes_of(None) == nodes_of([]) == nodes_of([{"zone": "x"}]) == []
    assert nodes_of([{**selector, "zone": "x"}]) == []


@pytest.mark.parametrize(
    ("free", "there"),
    [
        ({"a": {"CPU": 4.0, "GPU": 2.0}, "b": {"CPU": 2.0, "GPU": 1.0}}, True),
        ({"a": {"CPU": 4.0, "GPU": 1.0}, "b": {"CPU": 2.0, "GPU": 1.0}}, False),
        ({"a": {"CPU": 4.0, "GPU": 2.0}}, False),
        ({"a": {"GPU": 2.0}, "b": {"CPU": 2.0, "GPU": 1.0}}, False),
    ],
)
def test_there_is_room_for_all_ranks_of_a_node_or_none(
    free: Mapping[str, Mapping[str, float]], there: bool
) -> None:
    rooms = PINS.own("Rooms")(("a", "a", "b"), {"CPU": 2.0, "GPU": 1.0})
    assert rooms.is_there(free) is there


def test_ranks_may_fill_a_node_with_parts_of_a_device() -> None:
    rooms = PINS.own("Rooms")(("a", "a", "a"), {"GPU": 0.1})
    assert rooms.is_there({"a": {"GPU": 0.3}})
