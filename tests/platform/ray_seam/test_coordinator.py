"""The coordinator of resource requests can be taught labels, and keeps to its ways without them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.platform.ray_seam.pins import Pins

PINS = Pins("coordinator")
MODULE = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator"
NODES = [
    {"NodeID": name, "Alive": True, "Resources": {"CPU": 2.0}, "Labels": {"market": market}}
    for name, market in (("a", "on_demand"), ("b", "spot"), ("c", "spot"))
]


class Coordinator:
    """The actor's own object, with the calling form of an actor; calls happen at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = PINS.find(MODULE)
        monkeypatch.setattr(module, "_compute_reservations", module._compute_reservations)
        monkeypatch.setattr(module, "ebbtide_labels", None, raising=False)
        monkeypatch.delattr(module, "ebbtide_labels")
        self.sent: list[Any] = []
        self.actor = module._AutoscalingCoordinatorActor(
            send_resources_request=lambda bundles, label_selectors=None: self.sent.append(
                (bundles, label_selectors)
            ),
            get_cluster_nodes=lambda: NODES,
        )
        monkeypatch.setattr("ray.get", lambda value, **_: value)

    @property
    def __ray_call__(self) -> Any:
        actor = self.actor

        class Method:
            @staticmethod
            def remote(function: Any) -> Any:
                return function(actor)

        return Method

    def reserved(self, labels: list[dict[str, str]]) -> Any:
        self.actor.request_resources("run", [{"CPU": 1}] * len(labels), 60, label_selectors=labels)
        return self.actor.get_reserved_resources("run", recompute=True)


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    return Coordinator(monkeypatch)


def test_by_itself_it_reserves_nodes_that_were_not_asked_for(coordinator: Coordinator) -> None:
    """Were it otherwise, it need not be taught."""
    assert coordinator.reserved([{"market": "spot"}] * 2) == {"a": {"CPU": 2}}


def test_it_reserves_the_nodes_that_were_asked_for(coordinator: Coordinator) -> None:
    teach = PINS.own("teach_labels")
    for _ in range(2):
        teach(coordinator)
    spot = {"market": "spot"}
    assert coordinator.reserved([spot] * 3) == {"b": {"CPU": 2}, "c": {"CPU": 1}}
    assert coordinator.sent[-1] == ([{"CPU": 1}] * 3, [spot] * 3)
    both = [spot, spot, {"market": "on_demand"}]
    assert coordinator.reserved(both) == {"a": {"CPU": 1}, "b": {"CPU": 2}}
    assert coordinator.reserved([{"market": "on_prem"}]) == {}
    assert coordinator.reserved([{}, {}]) == {"a": {"CPU": 2}}


def test_the_actor_is_shared_and_can_be_called_with_a_function() -> None:
    PINS.says(f"{MODULE}:get_or_create_autoscaling_coordinator", 'name="AutoscalingCoordinator"')
    PINS.says("ray.actor", "__ray_call__")


def test_the_client_reads_no_more_of_a_request_than_it_is_given() -> None:
    build = "ray.train._internal.autoscaling_coordinator_client:build_train_resource_request"
    policies = Pins("train_policies")
    config = PINS.find("ray.train:ScalingConfig")(num_workers=(1, 4))
    request = policies.own("LabelledRequest")(config, [{"market": "spot"}, {}])
    assert PINS.find(build)(request, 2) == ([{"CPU": 1}] * 2, [{"market": "spot"}, {}])
    plain = policies.own("LabelledRequest")(config, [{}, {}])
    assert PINS.find(build)(plain, 2) == ([{"CPU": 1}] * 2, None)
    client = "ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client"
    client = f"{client}:TrainAutoscalingCoordinatorClient"
    for method in ("send_resource_request", "maybe_send_resource_request"):
        policies.takes(f"{client}.{method}", "self", "scaling_config", "num_workers", others=False)
