"""From a sweep's file to the training job of each trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.platform.errors import ConfigError
from ebbtide.tune.space import Sweep, read_sweep, with_values

SWEEP = """\
base: train.yaml
num_samples: 4
steps: 12
space:
  optimizer.lr: {loguniform: [1e-4, 1e-2]}
"""


def sweep(base_file: Path, *overrides: str, text: str = SWEEP) -> Sweep:
    path = base_file.parent / "tune.yaml"
    path.write_text(text)
    return read_sweep(path, overrides)


def refusal(base_file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        sweep(base_file, *overrides)
    return str(error.value)


def test_trials_differ_from_the_base_and_the_best_does_not(base_file: Path) -> None:
    found = sweep(base_file, "overrides={validation.sequences: 2}")
    assert found.trial_base is not None and found.base is not None
    assert (found.trial_base.steps, found.trial_base.validation.sequences) == (12, 2)
    assert (found.base.steps, found.base.validation.sequences) == (30, 64)
    assert found.name == "job-tune" and found.uri == f"{base_file.parent}/runs/job-tune"


def test_values_become_a_training_job(base_file: Path) -> None:
    base = sweep(base_file).base
    assert base is not None
    job = with_values(base, {"optimizer.lr": 0.5, "seed": 7})
    assert (job.optimizer.lr, job.seed, job.optimizer.beta1) == (0.5, 7, base.optimizer.beta1)
    with pytest.raises(ConfigError, match=r"optimizer\.lr: .*greater than 0"):
        with_values(base, {"optimizer.lr": -1})


@pytest.mark.parametrize(
    ("budget", "own", "limit"),
    [
        ("{max_dollars_per_run: 5}", "max_dollars", "2"),
        ("{max_dollars_per_hour: 5}", "max_dollars", "2"),
        ("{deadline: 2031-01-01T00:00:00Z}", "max_seconds", "60"),
    ],
)
def test_a_budget_of_the_base_is_not_taken_for_the_sweeps(
    base_file: Path, budget: str, own: str, limit: str
) -> None:
    base_file.write_text(f"{base_file.read_text()}\nbudget: {budget}\n")
    assert f"give the sweep its own {own}" in refusal(base_file)
    found = sweep(base_file, f"{own}={limit}")
    assert found.base is not None and found.base.budget.model_fields_set


def test_a_trial_shorter_than_the_warm_up_is_told_before_anything_starts(base_file: Path) -> None:
    assert "schedule.warmup_steps must not exceed steps" in refusal(base_file, "steps=5")


def test_values_that_a_key_cannot_take_are_refused(base_file: Path) -> None:
    assert "space.seed: -1 is not possible" in refusal(base_file, "space.seed={int: [-1, 3]}")
    told = refusal(base_file, "space.precision={choice: [fp32, fp8]}")
    assert "space.precision: 'fp8' is not possible" in told


def test_values_that_only_a_combination_makes_impossible_are_left_to_their_trial(
    base_file: Path,
) -> None:
    found = sweep(
        base_file,
        "space.batch.micro_sequences={choice: [1, 3]}",
        "space.batch.global_sequences={choice: [4, 6]}",
    )
    assert found.base is not None
    with pytest.raises(ConfigError, match="must be a multiple"):
        with_values(found.base, {"batch.global_sequences": 4, "batch.micro_sequences": 3})


def test_asha_needs_a_metric_while_a_trial_runs(base_file: Path) -> None:
    assert "overrides.validation.every_steps" in refusal(base_file, "scheduler=asha")
    sweep(base_file, "scheduler=asha", "overrides={validation.every_steps: 4}")


def test_a_missing_base_is_named(base_file: Path) -> None:
    assert "nowhere.yaml: cannot be read" in refusal(base_file, "base=nowhere.yaml")
