"""``ebbtide train`` as it is typed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest

from ebbtide.commands.train import document, progress_line, summary
from ebbtide.platform import config as job_file
from ebbtide.platform.process_session import processes
from ebbtide.train.driver import Progress
from ebbtide.train.events import read_events
from ebbtide.train.job import RunResult
from tests.train.conftest import MakeConfig


def ebbtide(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ebbtide", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def progress(rate: float | None = 8421.4, usd: Decimal | None = Decimal("12.34")) -> Progress:
    return Progress(
        step=120,
        steps=200,
        loss=4.23104,
        tokens_per_s=rate,
        world_size=4,
        attempt=2,
        usd=usd,
        usd_partial=False,
    )


RESULT = RunResult(
    name="run",
    run_uri="s3://bucket/run",
    step=200,
    attempts=4,
    world_sizes=[4, 3, 2, 3],
    loss_first=8.3,
    loss=4.2,
    validation_loss=4.3,
    steps_lost=3,
    usd=Decimal("12.34"),
    usd_partial=False,
    was_finished=False,
)


def test_the_progress_line_says_where_the_run_is() -> None:
    assert progress_line(progress()) == (
        "step 120/200  loss 4.2310  8,421 tokens/s  4 workers  attempt 2  $12.34"
    )
    assert progress_line(progress(None, None)).endswith(
        "- tokens/s  4 workers  attempt 2  cost unknown"
    )


def test_a_result_is_told_to_people_and_programs() -> None:
    assert summary(RESULT).splitlines()[0] == (
        "run is finished: 200 steps in 4 attempts, 3 steps made again, $12.34"
    )
    assert json.loads(json.dumps(document(RESULT)))["usd"] == 12.34


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("workers: {min_worker: 2}", "workers.min_worker is not a known key"),
        ("steps: 1\nsteps: 2", "steps is given twice"),
        ("steps: many", "steps"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    done = ebbtide("train", str(file))
    assert done.returncode == 2
    assert f"{file}:" in done.stderr
    assert told in done.stderr
    assert done.stdout == ""


@pytest.mark.ray
@pytest.mark.slow
def test_an_interrupted_run_leaves_no_process_and_goes_on_later(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """On a Ray of its own; Ctrl-C in the middle, then the same command again."""
    config = make_config(
        steps=60,
        model={"loss": "tests.train.user_code:slow_loss"},
        checkpoint={"every": 5},
        workers={"min": 1, "max": 1},
    )
    file = tmp_path / "job.yaml"
    file.write_text(job_file.dump(config))
    environment = {**os.environ, "HOME": str(tmp_path)}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "ebbtide", "train", str(file), "--json"]
    first = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 200
    while not any(event.kind == "checkpoint" for event in read_events(config.run_uri)):
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130, err
    assert out == ""
    assert "step 5/60" in err or "step " in err
    deadline_s = time.monotonic() + 30
    while left := processes(first.pid):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)
    assert not (tmp_path / ".ray").exists()

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    result = json.loads(again.stdout)
    assert (result["step"], result["attempts"], result["was_finished"]) == (60, 2, False)
