"""What a person reads while a node is lost, and what a program reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ebbtide.platform import config as job_file
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train.events import read_events
from tests.train.conftest import MakeConfig

_LIMIT_S = 240.0


@pytest.mark.ray
@pytest.mark.slow
def test_a_lost_peer_is_told_calmly_and_the_result_stays_readable(
    make_config: MakeConfig, tmp_path: Path, cluster: LocalCluster
) -> None:
    config = make_config(
        steps=40,
        model={"loss": "tests.train.user_code:slow_loss"},
        checkpoint={"every": 3},
        workers={"min": 1, "max": 3},
    )
    file = tmp_path / "job.yaml"
    file.write_text(job_file.dump(config))
    command = [sys.executable, "-m", "ebbtide", "train", str(file), "--json"]
    training = subprocess.Popen(
        [*command, "--address", cluster.address],
        env={**os.environ, **cluster.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(_LIMIT_S, training.kill)
    killer.start()
    try:
        while not any(event.kind == "checkpoint" for event in read_events(config.run_uri)):
            assert training.poll() is None, training.communicate()[1]
            time.sleep(0.1)
        begun = [event for event in read_events(config.run_uri) if event.kind == "generation"]
        cluster.kill(next(node for node in cluster.nodes if node.node_id == begun[-1].nodes[-1]))
        out, err = training.communicate()
    finally:
        killer.cancel()
        training.kill()
    assert training.returncode == 0, err
    assert json.loads(out)["step"] == 40
    assert len([line for line in err.splitlines() if " ended, node lost" in line]) == 1, err
    for unwanted in ("Traceback", "RayTrainWorker", "Error in training function", "\x1b["):
        assert unwanted not in err, err
    assert " info rank 0 removed checkpoint " in err
