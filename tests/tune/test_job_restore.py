"""Sweeps that go on where they were: killed, or at the end of a budget."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ebbtide.tune.results import SweepResult, Trial
from tests.tune.sweeps import (
    LR,
    driver,
    run,
    run_function,
    sweep_file,
    wait_for,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]


def test_a_finished_sweep_is_not_run_again(base_file: Path) -> None:
    text = LR + "num_samples: 2\n"
    first = run(base_file, text, "fine")
    again: list[Trial] = []
    assert run(base_file, text, "raises", on_trial=again.append) == first  # not looked at
    assert not again


def test_a_budget_ends_the_sweep_with_the_best_so_far_and_more_of_it_continues(
    tmp_path: Path,
) -> None:
    text = """\
num_samples: 40
space: {width: {uniform: [0, 1]}}
overrides: {rounds: 3, pause_s: 0.05}
cost: {instance_type: local-cpu}
"""
    short = run_function(tmp_path, "user", text + "max_dollars: 0.000012\n")
    assert short.status == "budget" and short.limit == "max_dollars ($0.000012) is spent"
    assert short.usd is not None and short.usd >= Decimal("0.000012") and not short.partial
    costs = [trial.usd for trial in short.trials if trial.status == "finished"]
    assert all(usd is not None and 0 < usd < short.usd for usd in costs)
    again = run_function(tmp_path, "user", text + "max_dollars: 0.000012\n")
    assert again == short
    whole = run_function(tmp_path, "user", text + "max_seconds: 600\n")
    assert whole.status == "finished" and whole.limit is None
    assert [trial.status for trial in whole.trials] == ["finished"] * 40
    kept = {trial.number: replace(trial, trial_id="") for trial in whole.trials}
    ended = [trial for trial in short.trials if trial.status == "finished"]
    assert [replace(trial, trial_id="") for trial in ended] == [kept[t.number] for t in ended]
    assert whole.usd is not None and whole.usd > short.usd


RESTORED = """\
space: {{seed: {{int: [0, 1000000]}}}}
searcher: optuna
num_samples: 14
steps: 9
overrides: {{schedule.warmup_steps: 0, validation.every_steps: 1, data.uri: {marks}}}
scheduler: asha
concurrency: 1
name: {name}
"""


def test_a_killed_sweep_continues_where_it_was(base_file: Path) -> None:
    """Twice, at any moment; Optuna's model and ASHA's rungs are those of a sweep left alone."""

    def text(name: str) -> str:
        return RESTORED.format(marks=base_file.parent / name, name=name)

    def marks(what: str) -> dict[str, int]:
        found = (base_file.parent / "killed").glob(f"{what}-*")
        return {path.name.partition("-")[2]: path.stat().st_size for path in found}

    kills, finished_at_a_kill = 0, dict[str, int]()
    for trials_before_the_kill in (4, 12):
        process = driver(sweep_file(base_file, text("killed")), "counted")
        try:
            wait_for(lambda count=trials_before_the_kill: len(marks("started")) >= count, 60)  # type: ignore[misc]
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        kills += 1
        finished_at_a_kill |= {seed: marks("started")[seed] for seed in marks("finished")}
    called_at_s = time.monotonic()
    result = run(base_file, text("killed"), "counted")
    print(f"continued and done after {time.monotonic() - called_at_s:.1f} s")
    started = marks("started")
    assert finished_at_a_kill and set(marks("finished").values()) == {1}
    assert {seed: started[seed] for seed in finished_at_a_kill} == finished_at_a_kill
    assert sum(started.values()) <= len(started) + kills
    assert {trial.tries for trial in result.trials} == {1}  # the driver's end is not the trial's

    alone = run(base_file, text("alone"), "counted")

    def outcome(of: SweepResult) -> list[tuple[Any, ...]]:
        return [
            (trial.number, trial.values, trial.status, trial.metric, trial.reports)
            for trial in of.trials
        ]

    assert outcome(result) == outcome(alone)
    assert {trial.status for trial in result.trials} == {"finished", "stopped"}
