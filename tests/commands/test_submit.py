"""``ebbtide submit`` and Ray's own doors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.platform import config as job_file
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import read_events
from tests.train.conftest import MakeConfig


def ebbtide(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ebbtide", *arguments]


@pytest.fixture
def job(make_config: MakeConfig) -> Callable[..., tuple[TrainConfig, Path]]:
    """A job and its file, which lies in the working directory as a user's does."""

    def make(**changes: object) -> tuple[TrainConfig, Path]:
        config = make_config(**{"steps": 8, "workers": {"min": 1, "max": 1}, **changes})
        file = Path(".ebbtide-test") / f"{uuid.uuid4().hex}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(job_file.dump(config))
        return config, file

    return make


def test_a_relative_path_would_be_lost_with_the_job(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: x\nstorage: .ebbtide/runs\nsteps: 1\nmodel: {source: m.json}\n"
        "data: {uri: /data, sequence_length: 8}\noptimizer: {lr: 1}\n"
        "batch: {global_sequences: 1, micro_sequences: 1}\n"
    )
    done = subprocess.run(ebbtide("submit", str(file)), capture_output=True, text=True)
    assert done.returncode == 2
    assert "storage: .ebbtide/runs is relative" in done.stderr


def test_a_file_outside_the_working_directory_does_not_travel(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: x\nstorage: /runs\nsteps: 1\nmodel: {source: m.json}\n"
        "data: {uri: /data, sequence_length: 8}\noptimizer: {lr: 1}\n"
        "batch: {global_sequences: 1, micro_sequences: 1}\n"
    )
    command = ebbtide("submit", str(file), "--working-dir", str(Path("ebbtide").resolve()))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not inside" in done.stderr
    command = ebbtide(
        "submit", str(file), "--working-dir", str(tmp_path), "--address", "http://127.0.0.1:1"
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 6
    assert "no Ray dashboard answers" in done.stderr


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_outlives_the_client_that_follows_it_and_is_followed_again(
    cluster: LocalCluster, job: Callable[..., tuple[TrainConfig, Path]]
) -> None:
    config, file = job(model={"loss": "tests.train.user_code:slow_loss"}, steps=25)
    name = f"job-{uuid.uuid4().hex[:8]}"
    command = ebbtide("submit", str(file), "--address", cluster.dashboard_url, "--name", name)
    command += ["--json"]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 200
    while not any(event.kind == "step" for event in read_events(config.run_uri)):
        assert client.poll() is None, client.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    client.kill()
    client.communicate()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "job_id": name,
        "submitted": False,
        "status": "SUCCEEDED",
        "exit_code": 0,
    }
    assert "attempt 0 begins: 1 worker" in done.stderr
    assert "step 25/25" in done.stderr
    sessions = [event for event in read_events(config.run_uri) if event.kind == "started"]
    assert len(sessions) == 1


@pytest.mark.ray
@pytest.mark.slow
def test_rays_own_door_and_ours_exit_as_the_job_does(
    cluster: LocalCluster, job: Callable[..., tuple[TrainConfig, Path]]
) -> None:
    _, file = job(
        model={"loss": "tests.train.user_code:failing_loss"},
        workers={"min": 1, "max": 1, "max_failures": 0},
    )
    ray_cli = [str(Path(sys.executable).with_name("ray")), "job", "submit"]
    ray_cli += ["--address", cluster.dashboard_url, "--working-dir", ".", "--"]
    done = subprocess.run(
        [*ray_cli, "python", "-m", "ebbtide", "train", str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode != 0
    assert "boom in user code" in done.stdout + done.stderr

    command = ebbtide("train", str(file), "--address", cluster.dashboard_url)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    assert "boom in user code" in done.stderr
