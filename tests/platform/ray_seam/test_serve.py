"""Ray Serve ends by the call that is used, and says nothing of it."""

from __future__ import annotations

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
