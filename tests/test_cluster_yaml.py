"""cluster.yaml held against Ray's own schema, and against what ebbtide promises of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from ebbtide.__main__ import app
from ebbtide.platform.ray_seam import fork_early

ROOT = Path(__file__).parents[1]
MARKETS = {"spot", "on_demand", "on_prem"}


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return loaded


def test_it_satisfies_rays_schema(cluster: dict[str, Any]) -> None:
    validate_config(prepare_config(cluster))


def test_a_misspelt_key_does_not_satisfy_rays_schema(cluster: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="max_worker"):
        validate_config({**cluster, "max_worker": 1})


def test_only_the_head_is_always_on_and_it_is_on_demand(cluster: dict[str, Any]) -> None:
    types = dict(cluster["available_node_types"])
    head = types.pop(cluster["head_node_type"])
    assert "InstanceMarketOptions" not in head["node_config"]
    assert all(kind["min_workers"] == 0 for kind in types.values())


def test_labels_tell_the_market_and_type_that_aws_is_asked_for(cluster: dict[str, Any]) -> None:
    for kind in cluster["available_node_types"].values():
        labels, node = kind["labels"], kind["node_config"]
        spot = node.get("InstanceMarketOptions", {}).get("MarketType") == "spot"
        assert labels["ebbtide.dev/instance-type"] == node["InstanceType"]
        assert labels["ebbtide.dev/market"] in MARKETS
        assert (labels["ebbtide.dev/market"] == "spot") is spot


def test_training_prefers_spot_and_can_fall_back(cluster: dict[str, Any]) -> None:
    training = {
        kind["labels"]["ebbtide.dev/market"]: kind
        for kind in cluster["available_node_types"].values()
        if kind["labels"]["ebbtide.dev/role"] == "train"
    }
    assert training["spot"]["priority"] > training["on_demand"]["priority"]
    assert training["spot"]["resources"] == training["on_demand"]["resources"]


def test_every_disk_is_encrypted_and_the_dashboard_stays_on_loopback(
    cluster: dict[str, Any],
) -> None:
    for kind in cluster["available_node_types"].values():
        for device in kind["node_config"]["BlockDeviceMappings"]:
            assert device["Ebs"]["Encrypted"] is True
    assert "--dashboard-host=127.0.0.1" in cluster["head_start_ray_commands"][-1]


def test_every_worker_imports_while_ray_starts(cluster: dict[str, Any]) -> None:
    (start,) = (each for each in cluster["worker_start_ray_commands"] if "ray start" in each)
    words = shlex.split(start)
    assert words[words.index("python") :][:5] == ["python", "-P", "-m", fork_early.MODULE, "ray"]


def test_every_worker_runs_the_agent_under_a_supervisor_with_options_that_it_has(
    cluster: dict[str, Any],
) -> None:
    words = shlex.split(cluster["worker_start_ray_commands"][-1])
    assert words[:2] == ["sudo", "systemd-run"]
    assert "--property=Restart=always" in words
    program = next(i for i, word in enumerate(words) if word.endswith("/venv/bin/ebbtide"))
    name, *options = words[program + 1 :]
    group = typer.main.get_group(app)
    assert name == "agent"
    command = group.get_command(group.make_context("ebbtide", [name]), name)
    assert command is not None
    command.make_context(name, options)
