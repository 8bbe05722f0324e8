"""The pin of Ray Serve's private interfaces: each test names what an upgrade has changed."""

from __future__ import annotations

import inspect

import pytest
import ray
from ray import serve
from ray.actor import ActorMethod
from ray.serve._private import client, controller

from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.serve import cluster as serving_cluster
from ebbtide.serve.ray_serve_seam import end_serve


def test_serve_is_ended_by_a_call_that_its_controller_does_not_answer() -> None:
    assert "graceful_shutdown.remote()" in inspect.getsource(client.ServeControllerClient.shutdown)
    assert "_shutdown_event.wait()" in inspect.getsource(
        controller.ServeController.graceful_shutdown
    )
    assert "max_task_retries" in inspect.signature(ActorMethod._remote).parameters


@pytest.mark.ray
def test_serve_ends_without_a_word_of_a_failed_task(
    cluster: LocalCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving_cluster.connected(cluster.address, ours=True):
        end_serve(30)  # there is none yet
        serve.start()
        assert serve.status().applications == {}
        end_serve(30)
        with pytest.raises(ValueError):
            ray.get_actor("SERVE_CONTROLLER_ACTOR", "serve")
        serve.start()  # and can begin again
        end_serve(30)
    said = capfd.readouterr()
    assert "failed" not in said.out + said.err
