"""``ebbtide submit`` and Ray's own doors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ebbtide.platform import config as job_file
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import read_events
from tests.train import user_code
from tests.train.conftest import MakeConfig


def ebbtide(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ebbtide", *arguments]


@dataclass(frozen=True)
class Job:
    """A job, its file, and the working directory with the user's code that it lies in."""

    config: TrainConfig
    file: Path
    working_dir: Path


@pytest.fixture
def make_job(make_config: MakeConfig, tmp_path: Path) -> Callable[..., Job]:
    def make(loss: str, **changes: object) -> Job:
        folder = tmp_path / "code"
        folder.mkdir()
        shutil.copy(Path(user_code.__file__), folder / "losses.py")
        config = make_config(
            **{"workers": {"min": 1, "max": 1}, "model": {"loss": f"losses:{loss}"}, **changes}
        )
        file = folder / "job.yaml"
        file.write_text(job_file.dump(config))
        return Job(config, file, folder)

    return make


@pytest.fixture
def file_in_root() -> Iterator[Path]:
    """A place for a job file in the repository's root, which is a working directory too."""
    file = Path(f"job-{uuid.uuid4().hex}.yaml")
    yield file
    file.unlink(missing_ok=True)


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
    command = ebbtide("train", "--resume", "runs/x", "--address", "http://127.0.0.1:1")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--resume: runs/x is relative" in done.stderr


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
    cluster: LocalCluster, make_job: Callable[..., Job]
) -> None:
    job = make_job("slow_loss", steps=25)
    name = f"job-{uuid.uuid4().hex[:8]}"
    command = ebbtide("submit", str(job.file), "--working-dir", str(job.working_dir), "--json")
    command += ["--address", cluster.dashboard_url, "--name", name]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline_s = time.monotonic() + 300
    while not any(event.kind == "step" for event in read_events(job.config.run_uri)):
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
    assert "attempt 0 begins" in done.stderr
    assert "step 25/25" in done.stderr
    sessions = [event for event in read_events(job.config.run_uri) if event.kind == "started"]
    assert len(sessions) == 1


@pytest.mark.ray
@pytest.mark.slow
def test_rays_own_door_and_ours_exit_as_the_job_does(
    cluster: LocalCluster, make_config: MakeConfig, file_in_root: Path
) -> None:
    """The repository is the working directory: its links travel as folders."""
    config = make_config(
        model={"loss": "tests.train.user_code:failing_loss"},
        workers={"min": 1, "max": 1, "max_failures": 0},
    )
    file_in_root.write_text(job_file.dump(config))
    ray_cli = [str(Path(sys.executable).with_name("ray")), "job", "submit"]
    ray_cli += ["--address", cluster.dashboard_url, "--working-dir", ".", "--"]
    done = subprocess.run(
        [*ray_cli, "python", "-m", "ebbtide", "train", str(file_in_root)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    assert done.returncode != 0
    assert "boom in user code" in done.stdout + done.stderr

    command = ebbtide("train", str(file_in_root), "--address", cluster.dashboard_url)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr
    assert "boom in user code" in done.stderr
