"""Ray Serve ends by the call that is used, and says nothing of it; and is scaled from outside."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from ray import serve

from ebbtide.platform.local_cluster import LocalCluster
from tests.platform.ray_seam.pins import Pins

PINS = Pins("serve")
NAME, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"


def test_serve_is_ended_by_a_call_that_its_controller_does_not_answer() -> None:
    client = "ray.serve._private.client:ServeControllerClient.shutdown"
    PINS.says(client, "graceful_shutdown.remote()")
    PINS.says("ray.serve._private.controller", "await self._shutdown_event.wait()")
    PINS.takes("ray.actor:ActorMethod._remote", "max_task_retries")
    assert PINS.find("ray.serve._private.constants:SERVE_CONTROLLER_NAME") == NAME
    assert PINS.find("ray.serve._private.constants:SERVE_NAMESPACE") == NAMESPACE


@pytest.mark.ray
def test_serve_ends_without_a_word_of_a_failed_task(
    cluster: LocalCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    end_serve = PINS.own("end_serve")
    ray.init(address=cluster.address, log_to_driver=False)
    end_serve(30)  # there is none yet
    serve.start()
    assert serve.status().applications == {}
    end_serve(30)
    with pytest.raises(ValueError):
        ray.get_actor(NAME, NAMESPACE)
    serve.start()  # and can begin again
    end_serve(30)
    said = capfd.readouterr()
    assert "failed" not in said.out + said.err


def test_replicas_can_be_counted_by_somebody_else() -> None:
    controller = "ray.serve._private.controller:ServeController.update_deployment_replicas"
    PINS.takes(controller, "deployment_id", "target_num_replicas")
    PINS.takes("ray.serve._private.common:DeploymentID", "name", "app_name")
    PINS.takes("ray.serve:RunTarget", "external_scaler_enabled")
    PINS.takes("ray.serve:delete", "name", "_blocking")
    PINS.takes("ray.experimental.internal_kv:_internal_kv_put", "key", "value", "namespace")
    PINS.takes("ray.experimental.internal_kv:_internal_kv_get", "key", "namespace")


@pytest.mark.ray
def test_replicas_come_and_go_and_those_that_stay_are_the_same(cluster: LocalCluster) -> None:
    scale, note, noted = PINS.own("scale"), PINS.own("note"), PINS.own("noted")

    class Nothing:
        pass

    options = {"graceful_shutdown_timeout_s": 0, "ray_actor_options": {"num_cpus": 0}}
    nothing: Any = serve.deployment(Nothing, **options)

    def until(number: int) -> set[str]:
        """The replicas, once there are so many."""
        deadline_s = time.monotonic() + 60
        while True:
            (deployment,) = serve.status().applications["some"].deployments.values()
            if deployment.replica_states == ({"RUNNING": number} if number else {}):
                found = ray.util.list_named_actors(all_namespaces=True)
                return {each["name"] for each in found if "some#Nothing" in each["name"]}
            assert time.monotonic() < deadline_s, deployment
            time.sleep(0.05)

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        assert noted("a") is None
        for value in ("1", "1 2"):
            note("a", value)
            assert noted("a") == value
        serve.start(proxy_location="Disabled")
        target = serve.RunTarget(
            nothing.bind(), name="some", route_prefix=None, external_scaler_enabled=True
        )
        serve.run_many([target], wait_for_applications_running=False)
        first = until(1)
        scale("some", 2)
        assert until(2) > first
        scale("some", 0)
        assert until(0) == set()
        scale("some", 1)
        assert len(until(1) - first) == 1
        PINS.own("end_applications")(["some"])
        while serve.status().applications:
            time.sleep(0.05)
    finally:
        PINS.own("end_serve")(30)
