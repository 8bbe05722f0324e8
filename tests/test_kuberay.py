"""The KubeRay example, read by Ray's own autoscaler and held against cluster.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config

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
