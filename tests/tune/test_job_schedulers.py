"""Trials that end early, or pause: on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pyarrow import parquet

from tests.tune.sweeps import (
    run,
    run_function,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]


@pytest.mark.parametrize("searcher", ["random", "optuna"])
def test_asha_stops_the_worst(base_file: Path, searcher: str) -> None:
    text = f"""\
space: {{seed: {{int: [0, 1000]}}}}
searcher: {searcher}
num_samples: 9
steps: 18
overrides: {{schedule.warmup_steps: 0, validation.every_steps: 1}}
scheduler: asha
"""
    result = run(base_file, text, "halving")
    stopped = [trial for trial in result.trials if trial.status == "stopped"]
    finished = [trial for trial in result.trials if trial.status == "finished"]
    assert stopped and finished and not result.failed
    assert result.best is not None
    assert result.best.metric == min(trial.values["seed"] for trial in result.trials)
    assert all(len(trial.reports) < 18 for trial in stopped)


@pytest.mark.parametrize("scheduler", ["hyperband", "median"])
def test_a_function_is_tried_and_the_bad_ones_end_early(tmp_path: Path, scheduler: str) -> None:
    space = "space: {width: {uniform: [0, 1]}}\noverrides: {rounds: 9}\n"
    text = f"num_samples: 9\nsteps: 9\nscheduler: {scheduler}\n{space}"
    result = run_function(tmp_path, "user", text)
    assert len(result.trials) == 9 and not result.failed
    best = result.best
    assert best is not None and best.metric is not None and result.best_file is not None
    assert best.metric == pytest.approx(abs(best.values["width"] - 0.3) + 1 / len(best.reports))
    stopped = [trial for trial in result.trials if trial.status == "stopped"]
    assert stopped and all(len(trial.reports) < 9 and trial.tries == 1 for trial in stopped)
    for trial in result.trials:  # one that was paused went on where it was
        assert [report["step"] for report in trial.reports] == [*range(1, len(trial.reports) + 1)]
    values = yaml.safe_load(Path(result.best_file).read_text())
    assert values == {"rounds": 9, **best.values}

    table = parquet.read_table(Path(result.uri, "trials.parquet")).to_pylist()
    assert [row["loss"] for row in table] == [trial.metric for trial in result.trials]
    assert [row["value.width"] for row in table] == [t.values["width"] for t in result.trials]
    reports = parquet.read_table(Path(result.uri, "reports.parquet")).num_rows
    assert reports == sum(len(trial.reports) for trial in result.trials)
