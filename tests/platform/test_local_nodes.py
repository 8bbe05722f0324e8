"""Chaos on a real cluster: real processes, real signals, and the way in from another process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ebbtide.platform import process_session
from ebbtide.platform.chaos import Chaos
from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_nodes import LocalNodes
from ebbtide.platform.ray_seam.state import draining_nodes


class Busy:
    """Holds a worker process on its node."""

    def is_there(self) -> bool:
        return True


def await_that(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def state_of(pid: int) -> str:
    """The process's state as ``ps`` shows it: T is stopped; empty if it is gone."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.fixture
def nodes(cluster: LocalCluster) -> Iterator[LocalNodes]:
    ray.init(address=cluster.address, log_to_driver=False)
    yield LocalNodes(cluster.address)


def occupy(node_id: str) -> Any:
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(Busy).options(num_cpus=1, scheduling_strategy=here).remote()
    ray.get(actor.is_there.remote())
    return actor


@pytest.mark.ray
def test_workers_and_nodes_are_stopped_killed_drained_and_added(
    cluster: LocalCluster, nodes: LocalNodes
) -> None:
    chaos = Chaos(nodes)
    first, second, third, fourth = cluster.nodes
    assert [node.name for node in chaos.usable()] == [node.name for node in cluster.nodes]

    busy = [occupy(first.node_id), occupy(second.node_id), occupy(third.node_id)]
    stopped = chaos.stop_worker(first.name, 0.5, named="Busy")
    pid = stopped.pid
    assert pid is not None
    await_that(lambda: state_of(pid) == "T")  # a signal arrives when its process is next at work
    chaos.run()
    await_that(lambda: state_of(pid) not in ("T", ""))

    chaos = Chaos(nodes)
    killed = chaos.kill_worker(second.name)
    assert killed.pid is not None
    await_that(lambda: state_of(killed.pid or 0) in ("", "Z"))
    assert cluster.is_alive(second)

    drained = chaos.drain(third.name, 90)
    assert draining_nodes() == {third.node_id: pytest.approx(drained.time_s + 90, abs=1)}

    chaos.kill(fourth.name)
    assert process_session.processes(fourth.process.pid) == []
    await_that(lambda: not cluster.is_alive(fourth))

    chaos.stop(second.name, 60)
    await_that(
        lambda: {state_of(each) for each in process_session.processes(second.process.pid)} == {"T"}
    )
    await_that(lambda: not cluster.is_alive(second))  # Ray gives up a node that does not answer

    added = chaos.add()
    assert [node.name for node in chaos.usable()] == [first.name, added.node]
    chaos.finish()
    assert not cluster.is_alive(third) or process_session.processes(third.process.pid) == []
    assert [each.deed for each in chaos.log] == [
        "kill_worker",
        "drain",
        "kill",
        "stop",
        "add",
        "take_away",
        "go_on",
    ]
    del busy


@pytest.mark.ray
def test_another_process_does_a_plan_to_the_cluster_and_the_owner_keeps_the_added_node(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    victim = cluster.nodes[1].name
    plan.write_text(f"replace_after_s: 0.1\nevents: [{{at_s: 0, do: kill, node: {victim}}}]")
    command = [sys.executable, "-m", "ebbtide", "chaos", "--plan", str(plan), "--json"]
    done = subprocess.run(
        [*command, "--address", cluster.address], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2, done.stdout
    kill, add = [json.loads(line) for line in done.stdout.splitlines()]
    assert (kill["deed"], kill["node"], kill["event"]) == ("kill", victim, 0)
    assert (add["deed"], add["event"]) == ("add", 0)
    assert add["node"] in [node.name for node in cluster.nodes]
    assert cluster.is_alive(cluster.nodes[-1])


def test_no_cluster_on_this_machine_is_refused() -> None:
    with pytest.raises(ClusterError, match="no node of this cluster runs on this machine"):
        LocalNodes("10.255.255.1:6379")


def test_a_plan_or_a_rate_is_wanted_and_steps_need_a_run(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("events: [{at_step: 3, do: add}]")
    command = [sys.executable, "-m", "ebbtide", "chaos", "--address", "h:1"]
    for options, fault in (
        ([], "give either --plan FILE or --rate R"),
        (["--plan", str(plan), "--rate", "3"], "give either --plan FILE or --rate R"),
        (["--rate", "0"], "--rate 0: must be a number above 0"),
        (["--rate", "nan"], "--rate nan: must be a number above 0"),
        (["--rate", "9", "--duration-s", "inf"], "is more than 100,000 events"),
        (["--plan", str(plan)], "at_step needs --run"),
    ):
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 2
        assert fault in done.stderr
