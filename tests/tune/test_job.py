"""Whole sweeps on a real cluster: what they find and what they write."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from ebbtide.platform.config import load
from ebbtide.platform.errors import AlreadyExists
from ebbtide.train import preflight
from ebbtide.train.config import TrainConfig
from ebbtide.tune.results import SweepResult, Trial
from tests.train.conftest import Tiny
from tests.tune.sweeps import (
    LR,
    program,
    run,
    run_function,
    sweep_file,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]


def test_a_sweep_writes_the_best_job_and_every_result(base_file: Path) -> None:
    ended: list[Trial] = []
    result = run(base_file, LR + "num_samples: 6\nseed: 3\n", "fine", on_trial=ended.append)
    assert [trial.status for trial in result.trials] == ["finished"] * 6
    assert len(ended) == 6 and not result.failed
    best = result.best
    assert best is not None and result.best_file is not None
    assert best.metric == min(abs(t.values["optimizer.lr"] - 0.01) for t in result.trials)
    assert [report["step"] for report in best.reports] == [1, 2, 3]

    job = load(result.best_file, TrainConfig)
    base = load(base_file, TrainConfig)
    assert job.optimizer.lr == best.values["optimizer.lr"]
    changed = job.optimizer.model_copy(update={"lr": base.optimizer.lr})
    assert job.model_copy(update={"optimizer": changed}) == base

    document = json.loads(Path(result.uri, "results.json").read_text())
    assert document["status"] == "finished" and len(document["trials"]) == 6
    assert document["best"]["optimizer.lr"] == best.values["optimizer.lr"]


def test_the_same_sweep_proposes_the_same_and_finds_the_same(base_file: Path) -> None:
    text = LR + "num_samples: 4\nseed: 5\n"
    first = run(base_file, text, "torch_fit")
    again = run(base_file, text + "concurrency: 1\nname: again\n", "torch_fit")

    def losses(result: SweepResult) -> dict[float, list[float]]:
        return {
            trial.values["optimizer.lr"]: [report["validation_loss"] for report in trial.reports]
            for trial in result.trials
        }

    assert losses(first) == losses(again)
    assert first.best is not None and again.best is not None
    assert first.best.metric == again.best.metric


def test_another_sweep_does_not_write_over_the_results(base_file: Path) -> None:
    run(base_file, LR + "num_samples: 1\n", "fine")
    before = Path(base_file.parent, "runs/job-tune/results.json").read_bytes()
    with pytest.raises(AlreadyExists, match="holds the results of a different sweep"):
        run(base_file, LR + "num_samples: 2\n", "fine")
    with pytest.raises(AlreadyExists, match="exists already"):
        run(base_file, LR + "num_samples: 1\n", "fine", out=str(base_file))
    assert Path(base_file.parent, "runs/job-tune/results.json").read_bytes() == before


SWEEP = """\
steps: 6
overrides: {schedule.warmup_steps: 2, validation.every_steps: 3, validation.sequences: 4}
searcher: grid
space: {optimizer.lr: {choice: [1e-3, 1e-2, 1e+20]}}
"""

FRESH = """\
import json, sys
from ebbtide.platform.config import load
from ebbtide.train.config import TrainConfig
from ebbtide.train.trial import run_trial

reports = []
run_trial(load(sys.argv[1], TrainConfig, sys.argv[2:]), reports.append)
print(json.dumps(reports))
"""


def test_a_sweep_over_real_training_as_it_is_typed(base_file: Path, tiny: Tiny) -> None:
    text = base_file.read_text().replace("model.json", tiny.model)
    base_file.write_text(text.replace("uri: data", f"uri: {tiny.data}"))
    found = program("-m", "ebbtide", "tune", str(sweep_file(base_file, SWEEP)), "--json")
    assert found.returncode == 0
    document = json.loads(found.stdout)
    by_lr = {trial["values"]["optimizer.lr"]: trial for trial in document["trials"]}
    assert by_lr[1e20]["status"] == "failed" and "step" in by_lr[1e20]["reason"]
    assert document["best"]["optimizer.lr"] in (1e-3, 1e-2)

    changes = ["steps=6", "schedule.warmup_steps=2", "optimizer.lr=1e-2"]
    changes += ["validation.every_steps=3", "validation.sequences=4"]
    fresh = program("-c", FRESH, str(base_file), *changes)
    assert json.loads(fresh.stdout) == by_lr[1e-2]["reports"]

    preflight.check(load(document["best_file"], TrainConfig))


@pytest.mark.parametrize(
    ("searcher", "count"),
    [("grid", 4), ("random\nnum_samples: 6", 6), ("optuna\nnum_samples: 6", 6)],
)
def test_a_key_with_a_condition_is_only_there_under_it(
    tmp_path: Path, searcher: str, count: int
) -> None:
    text = f"""\
searcher: {searcher}
space:
  optimizer: {{choice: [adam, sgd]}}
  momentum: {{choice: [0.7, 0.8, 0.9], when: {{optimizer: sgd}}}}
"""
    result = run_function(tmp_path, "user_at_once", text)
    assert len(result.trials) == count and not result.failed
    for trial in result.trials:
        assert ("momentum" in trial.values) == (trial.values["optimizer"] == "sgd")


def test_the_cost_of_a_sweep_is_in_its_ledger(base_file: Path) -> None:
    text = LR + "num_samples: 3\ncost: {instance_type: local-cpu}\n"
    result = run(base_file, text, "fine")
    found = program("-m", "ebbtide", "cost", result.uri, "--json")
    assert found.returncode == 0
    document = json.loads(found.stdout)
    assert document["status"] == "finished" and not document["partial"]
    assert 0 < document["owners"]["compute"]["cost_usd"] <= document["cost_usd"]
    trials = {trial["number"]: Decimal(trial["usd"]) for trial in document["trials"]}
    assert trials == {trial.number: trial.usd for trial in result.trials}
    assert document["startup_saved_s"] == pytest.approx(result.saved_s)
    every = program("-m", "ebbtide", "cost", "--all", "--storage", str(base_file.parent / "runs"))
    assert every.returncode == 0 and result.name in every.stdout
