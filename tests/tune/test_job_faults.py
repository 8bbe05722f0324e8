"""What fails in a sweep, and what a killed driver leaves: on a real cluster."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ebbtide.platform.errors import TuneError
from ebbtide.train.ray_connection import connected
from tests.tune.sweeps import (
    LR,
    driver,
    pool_status,
    run,
    sweep_file,
    wait_for,
)
from tests.tune.trials import MISDEEDS

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]


MISBEHAVING = """\
searcher: grid
space: {{seed: {{choice: {seeds}}}}}
overrides: {{data.uri: {folder}/marks}}
trial_timeout_s: 3
"""


def test_every_fault_stays_with_its_trial_and_the_pool_is_whole_again(base_file: Path) -> None:
    text = MISBEHAVING.format(seeds=list(range(len(MISDEEDS))), folder=base_file.parent)
    result = run(base_file, text, "misbehave")
    by_kind = {MISDEEDS[trial.values["seed"]]: trial for trial in result.trials}
    assert len(by_kind) == len(MISDEEDS) == len(result.trials)
    reasons = {
        "raises": "ValueError: the learning rate is cursed",
        "is nan": "validation_loss is nan",
        "is inf": "validation_loss is inf",
        "always exits": "exit code 3 (2 times)",
        "is killed": "SIGKILL (out of memory?) (2 times)",
        "hangs": "time-out of 3 s",
        "leaves a process": "exit code 4 (2 times)",
    }
    for kind, reason in reasons.items():
        assert by_kind[kind].status == "failed", kind
        assert reason in (by_kind[kind].reason or ""), kind
    recovered = {"exits once", "sys.exits once", "kills the zygote", "kills the evaluator"}
    for kind in recovered:
        assert (by_kind[kind].status, by_kind[kind].tries) == ("finished", 2), kind
    # A report that lacks the metric keeps the value of the one before.
    assert set(by_kind) == {*reasons, *recovered, "behaves", "reports nothing"}
    assert result.best is by_kind["behaves"]

    def whole() -> bool:
        members = pool_status()
        return len(members) == 2 and all(member["answers"] for member in members)

    wait_for(whole)
    assert all(member["trial_id"] is None for member in pool_status())


def test_failed_trials_are_not_the_best_where_more_is_better(base_file: Path) -> None:
    kinds = ["raises", "is nan", "is inf", "behaves", "exits once"]
    seeds = [MISDEEDS.index(kind) for kind in kinds]
    text = MISBEHAVING.format(seeds=seeds, folder=base_file.parent) + "mode: max\n"
    result = run(base_file, text, "misbehave")
    assert len(result.failed) == 3 and all(trial.reason for trial in result.failed)
    assert result.best is not None
    assert result.best.values["seed"] == MISDEEDS.index("exits once")


def test_when_every_trial_fails_the_sweep_does(base_file: Path) -> None:
    text = MISBEHAVING.format(seeds=[1, 2], folder=base_file.parent)
    with pytest.raises(TuneError, match=r"no trial of job-tune succeeded \(2 failed: .*cursed"):
        run(base_file, text, "misbehave")
    document = json.loads(Path(base_file.parent, "runs/job-tune/results.json").read_text())
    assert document["best"] is None and document["failed"] == 2


def test_a_killed_driver_holds_nothing(base_file: Path) -> None:
    import ray
    from ray.util.placement_group import placement_group

    marks = base_file.parent / "marks"
    text = LR + f"num_samples: 4\noverrides: {{data.uri: {marks}}}\n"
    process = driver(sweep_file(base_file, text), "slow")
    try:
        wait_for(lambda: marks.exists() and len(list(marks.iterdir())) == 2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    pids = [int(path.name) for path in marks.iterdir()]
    with connected():
        cpus = int(ray.cluster_resources()["CPU"])
        assert placement_group([{"CPU": 1}] * cpus).wait(10), "a job of full size cannot start"
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)
        assert all(member["sweep_id"] is None for member in pool_status())
    result = run(base_file, LR + "num_samples: 2\nname: next\n", "fine")
    assert len(result.trials) == 2 and not result.failed
