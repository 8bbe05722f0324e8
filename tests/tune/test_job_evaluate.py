"""Checkpoints scored as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbtide.platform.config import dump
from ebbtide.train.events import read_events
from ebbtide.train.trial import run_trial
from tests.train.conftest import MakeConfig
from tests.tune.sweeps import (
    program,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]


def test_checkpoints_are_scored_as_it_is_typed(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=2, validation={"every_steps": 1}, checkpoint={"every": 1})
    reports: list[dict[str, float]] = []
    run_trial(config, reports.append, checkpoints=True)
    run, missing = f"{config.storage}/{config.name}", str(tmp_path / "missing")
    found = program("-m", "ebbtide", "tune", "evaluate", missing, run, "--json")
    assert found.returncode == 0
    best, failed = json.loads(found.stdout)
    assert (best["checkpoint"], best["step"]) == (run, 2)
    assert best["validation_loss"] == reports[-1]["validation_loss"]
    assert failed["checkpoint"] == missing and "no complete checkpoint" in failed["reason"]
    assert program("-m", "ebbtide", "tune", "evaluate", missing).returncode == 9


SUITE = """\
tasks:
  own: {{}}
  elsewhere: {{data: {data}, sequences: 3}}
  size: {{scorer: "trials:size", mode: max}}
  broken: {{scorer: "trials:broken"}}
"""


def test_a_suite_scores_by_each_of_its_tasks(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=2, validation={"every_steps": 1}, checkpoint={"every": 1})
    reports: list[dict[str, float]] = []
    run_trial(config, reports.append, checkpoints=True)
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE.format(data=config.data.uri))
    run = f"{config.storage}/{config.name}"
    found = program("-m", "ebbtide", "tune", "evaluate", run, "--suite", str(suite), "--json")
    assert found.returncode == 0
    (row,) = json.loads(found.stdout)
    assert row["own"] == reports[-1]["validation_loss"] != row["elsewhere"] > 0
    assert row["size"] > 0 and row["broken"] is None
    assert "broken: ZeroDivisionError" in row["reason"]


def test_a_training_leaves_its_validation_to_the_pool(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        steps=3,
        validation={"every_steps": 1, "where": "pool"},
        checkpoint={"every": 100, "keep_last": 9},
    )
    reports: list[dict[str, float]] = []
    run_trial(config, reports.append)  # without checkpoints it validates by itself
    file = tmp_path / "job.yaml"
    file.write_text(dump(config))
    found = program("-m", "ebbtide", "train", str(file), "--json")
    assert found.returncode == 0
    events = read_events(config.run_uri)
    scores = {event.step: event.loss for event in events if event.kind == "validation"}
    assert scores == {report["step"]: report["validation_loss"] for report in reports}
    assert json.loads(found.stdout)["validation_loss"] == scores[3]
