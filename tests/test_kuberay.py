"""The KubeRay examples: read by Ray's own autoscaler, by ebbtide, and held against cluster.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config

from ebbtide.platform import config as job_file
from ebbtide.serve.capacity import shortfall
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import demand

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(
        (ROOT / "examples" / "kuberay" / "raycluster.yaml").read_text()
    )
    return loaded


@pytest.fixture(scope="module")
def types(cluster: dict[str, Any]) -> dict[str, Any]:
    """The node types that Ray's autoscaler makes of it."""
    cluster["metadata"]["namespace"] = "default"
    config = _derive_autoscaling_config_from_ray_cr(cluster)
    found: dict[str, Any] = config["available_node_types"]
    return found


def test_its_node_types_are_those_of_the_cluster_launchers_file(types: dict[str, Any]) -> None:
    launcher = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text()))
    for name in ("train-spot", "train-on-demand"):
        here, there = types[name], launcher["available_node_types"][name]
        for key in ("labels", "priority", "min_workers", "max_workers"):
            assert here[key] == there[key]
        assert (here["resources"]["CPU"], here["resources"]["GPU"]) == (48, 4)


def test_nothing_runs_on_the_head_and_every_ray_process_needs_the_token(
    cluster: dict[str, Any], types: dict[str, Any]
) -> None:
    assert types["headgroup"]["resources"]["CPU"] == 0
    spec = cluster["spec"]
    assert spec["autoscalerOptions"]["version"] == "v2"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            names = {variable["name"] for variable in container["env"]}
            assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= names


def test_the_endpoint_s_job_fits_its_cluster_and_its_service_leads_to_it() -> None:
    text = (ROOT / "examples" / "kuberay" / "rayjob-serve.yaml").read_text()
    settings, service, job = yaml.safe_load_all(text)
    config = job_file.parse(settings["data"]["serve.yaml"], ServeConfig, "serve.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]
    (container,) = head["spec"]["containers"]
    (mount,) = container["volumeMounts"]
    command = job["spec"]["entrypoint"].split()
    assert command == ["ebbtide", "serve", f"{mount['mountPath']}/serve.yaml", "--address", "auto"]
    assert head["spec"]["volumes"] == [
        {"name": mount["name"], "configMap": {"name": settings["metadata"]["name"]}}
    ]
    (port,) = service["spec"]["ports"]
    assert (port["targetPort"], config.http.host) == (config.http.port, "0.0.0.0")
    assert service["spec"]["selector"].items() <= head["metadata"]["labels"].items()

    derived = _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": "serve", "namespace": "default"}, "spec": cluster}
    )["available_node_types"]
    assert derived["headgroup"]["resources"]["CPU"] == 0
    nodes = [each["resources"] for each in derived.values() for _ in range(each["min_workers"])]
    assert shortfall(demand(config, config.counts), nodes) is None
    assert cluster["authOptions"] == {"mode": "token"}
    assert [variable["name"] for variable in container["env"]] == ["EBBTIDE_API_KEYS"]
    for group in cluster["workerGroupSpecs"]:
        assert not any("env" in each for each in group["template"]["spec"]["containers"])
