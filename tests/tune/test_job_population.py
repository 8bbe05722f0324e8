"""Population based training on a real cluster: whose state a trial goes on from, and what is lost
comes again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ebbtide.tune.results import SweepResult, Trial
from tests.train.conftest import Tiny
from tests.tune.sweeps import (
    driver,
    function_file,
    program,
    run_function,
    sweep_file,
    wait_for,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]

ROUNDS = 12
CLIMBS = """\
num_samples: {trials}
steps: {rounds}
space: {{speed: {{uniform: [0, 1]}}}}
overrides: {{rounds: {rounds}, marks: {marks}, pause_s: {pause_s}}}
scheduler: {scheduler}
pbt: {{interval_steps: 3}}
concurrency: {concurrency}
name: {name}
"""


def climbs(folder: Path, **options: Any) -> str:
    marks = folder / f"marks-{options.get('name', 'climbs')}"
    marks.mkdir(exist_ok=True)
    known = {
        "trials": 4,
        "rounds": ROUNDS,
        "scheduler": "pbt",
        "concurrency": 2,
        "pause_s": 0,
        "name": "climbs",
    }
    return CLIMBS.format(**{**known, "marks": marks, **options})


def require_right(trials: Sequence[Trial]) -> None:
    """Each trial ends where the states that it went on from, and its own speed since, lead."""
    by_number = {trial.number: trial for trial in trials}
    for trial in trials:
        assert trial.status == "finished", trial.reason
        assert trial.reports[-1]["step"] == ROUNDS
        if trial.taken_over:
            last = trial.taken_over[-1]
            assert trial.values == last["values"] and 0 <= trial.values["speed"] <= 1
            since = [report["loss"] for report in trial.reports if report["step"] > last["step"]]
            own = since[-(ROUNDS - round(last["step"])) :]
            gains = [before - after for before, after in itertools.pairwise(own)]
            assert gains == pytest.approx([trial.values["speed"]] * len(gains))
        for taken in trial.taken_over:
            if taken["step"] == ROUNDS:
                continue  # there is nothing after it
            source, speed = by_number[taken["from"]], taken["values"]["speed"]
            there = [r["loss"] - speed for r in source.reports if r["step"] == taken["step"]]
            here = [r["loss"] for r in trial.reports if r["step"] == taken["step"] + 1]
            assert any(loss == pytest.approx(start) for start in there for loss in here)


def test_the_worst_go_on_from_the_best(tmp_path: Path) -> None:
    result = run_function(tmp_path, "climbs", climbs(tmp_path))
    assert any(trial.taken_over for trial in result.trials), "nobody took over a state"
    require_right(result.trials)
    steps = sum(path.stat().st_size for path in (tmp_path / "marks-climbs").glob("steps-*"))
    assert steps == sum(len(trial.reports) for trial in result.trials), "a step was made again"


def test_a_state_that_is_lost_with_its_evaluator_is_made_again(tmp_path: Path) -> None:
    text = climbs(tmp_path)
    (tmp_path / "marks-climbs" / "kill").touch()
    result = run_function(tmp_path, "climbs", text)
    assert not (tmp_path / "marks-climbs" / "kill").exists()
    require_right(result.trials)
    assert 2 in {trial.tries for trial in result.trials}


@pytest.mark.parametrize("scheduler", ["pbt", "hyperband"])
def test_a_killed_sweep_of_trials_that_wait_continues_where_it_was(
    tmp_path: Path, scheduler: str
) -> None:
    """The scheduler decides, and draws, and the trials take over, as if left alone."""
    options = {"concurrency": 1, "scheduler": scheduler, "trials": 6}
    killed = climbs(tmp_path, pause_s=0.02, name="killed", **options)
    process = driver(function_file(tmp_path, "climbs", killed))
    try:
        wait_for(lambda: starts_of(tmp_path, "killed") >= 6, 60)
    finally:
        process.kill()
        process.wait()
    again = run_function(tmp_path, "climbs", killed)
    alone = run_function(tmp_path, "climbs", climbs(tmp_path, name="alone", **options))

    def outcome(of: SweepResult) -> list[tuple[Any, ...]]:
        return [
            (t.number, t.values, t.status, t.metric, t.taken_over, t.reports) for t in of.trials
        ]

    assert any(t.taken_over if scheduler == "pbt" else t.status == "stopped" for t in alone.trials)
    assert outcome(again) == outcome(alone)


def starts_of(folder: Path, name: str) -> int:
    return sum(path.stat().st_size for path in (folder / f"marks-{name}").glob("started-*"))


TRAINING = """\
steps: 6
overrides: {schedule.warmup_steps: 2, validation.every_steps: 1, validation.sequences: 4}
num_samples: 4
space: {optimizer.lr: {loguniform: [1e-5, 1e-1]}}
scheduler: pbt
pbt: {interval_steps: 2, quantile: 0.5}
"""


def test_real_training_goes_on_from_a_state_as_it_is_typed(base_file: Path, tiny: Tiny) -> None:
    text = base_file.read_text().replace("model.json", tiny.model)
    base_file.write_text(text.replace("uri: data", f"uri: {tiny.data}"))
    found = program("-m", "ebbtide", "tune", str(sweep_file(base_file, TRAINING)), "--json")
    assert found.returncode == 0
    trials = json.loads(found.stdout)["trials"]
    assert any(trial["taken_over"] for trial in trials)
    assert all(trial["reports"][-1]["step"] == 6 for trial in trials)
