"""Sweeps and the pool they share: the next one, the more urgent one, the idle pool."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train.ray_connection import connected
from tests.tune.sweeps import (
    LR,
    driver,
    pool_status,
    program,
    run,
    sweep_file,
    wait_for,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]


def test_more_than_the_cluster_has_is_told(base_file: Path) -> None:
    text = LR + "num_samples: 1\npool: {cpus: 3, namespace: big, start_timeout_s: 1}\n"
    with pytest.raises(ClusterError, match="needs 3 CPUs on one node, the cluster has"):
        run(base_file, text, "fine")


def test_the_next_driver_finds_the_evaluators_warm(base_file: Path) -> None:
    text = LR + "num_samples: 2\n"
    run(base_file, text, "fine")
    warm = {(member["name"], member["zygote_pid"]) for member in pool_status()}
    assert len(warm) == 2
    called_at_s = time.time()
    process = driver(sweep_file(base_file, text + "name: second\n"), "fine")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert {(member["name"], member["zygote_pid"]) for member in pool_status()} == warm
    print(f"second driver: first trial after {float(output) - called_at_s:.2f} s")
    assert float(output) - called_at_s < 10


def test_a_sweep_of_higher_priority_goes_first_and_the_other_goes_on(base_file: Path) -> None:
    marks = base_file.parent / "marks"
    space = "space: {seed: {int: [0, 1000000]}}\nsteps: 6\n"
    text = f"{space}num_samples: 500\nname: long\noverrides: {{data.uri: {marks}"
    text += ", schedule.warmup_steps: 0}\n"
    process = driver(sweep_file(base_file, text), "counted")
    try:
        wait_for(lambda: len(list(marks.glob("finished-*"))) >= 2, 60)
        first = run(base_file, LR + "num_samples: 4\npool: {priority: 1}\n", "fine")
        assert len(first.trials) == 4 and not first.failed
        assert process.poll() is None
        ended = len(list(marks.glob("finished-*")))
        wait_for(lambda: len(list(marks.glob("finished-*"))) > ended + 3, 60)
    finally:
        process.kill()
        process.wait()
    assert {path.stat().st_size for path in marks.glob("started-*")} == {1}


def test_an_idle_pool_shrinks_to_its_minimum(cluster: LocalCluster) -> None:
    arguments = ["--namespace", "idle", "--address", cluster.address]
    wanted = ["--size", "2", "--min", "1", "--idle-timeout", "1", "--json"]
    found = program("-m", "ebbtide", "tune", "pool", "up", *wanted, *arguments)
    assert found.returncode == 0
    assert [member["name"] for member in json.loads(found.stdout)][0] == "evaluator-0"
    from ebbtide.tune import members

    with connected():
        wait_for(lambda: [each["name"] for each in members.status("idle")] == ["evaluator-0"])
        assert members.down("idle") == 1
