"""Whole sweeps on a real cluster: isolation, faults, the next driver, the next sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbtide.platform.config import load
from ebbtide.platform.errors import AlreadyExists, ClusterError, TuneError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train import preflight
from ebbtide.train.config import TrainConfig
from ebbtide.train.ray_connection import connected
from ebbtide.tune.job import run_sweep
from ebbtide.tune.results import SweepResult, Trial
from ebbtide.tune.space import read_sweep
from tests.train.conftest import Tiny
from tests.tune.trials import MISDEEDS

pytestmark = pytest.mark.ray
FOLDER = Path(__file__).parent


@pytest.fixture(autouse=True)
def in_reach(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)  # where ``trials`` is imported from
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)


@pytest.fixture(scope="module", autouse=True)
def pool_ended(cluster_session: LocalCluster) -> Iterator[None]:
    """The evaluators stay for all tests here, and no longer."""
    yield
    from ebbtide.tune import pool

    with connected(cluster_session.address):
        pool.down("ebbtide-pool")


def sweep_file(base_file: Path, text: str) -> Path:
    path = base_file.parent / "tune.yaml"
    path.write_text("base: train.yaml\n" + text)
    return path


def run(base_file: Path, text: str, function: str, **options: Any) -> SweepResult:
    sweep = read_sweep(sweep_file(base_file, text))
    return run_sweep(sweep, function=f"trials:{function}", **options)


def pool_status() -> list[dict[str, Any]]:
    from ebbtide.tune import pool

    with connected():
        return pool.status("ebbtide-pool")


LR = "space: {optimizer.lr: {loguniform: [1e-4, 1e-1]}}\n"


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
    again = run(base_file, text + "concurrency: 1\n", "torch_fit")

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


def test_more_than_the_cluster_has_is_told(base_file: Path) -> None:
    text = LR + "num_samples: 1\npool: {cpus: 3, namespace: big, start_timeout_s: 1}\n"
    with pytest.raises(ClusterError, match="needs 3 CPUs on one node, the cluster has"):
        run(base_file, text, "fine")


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
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=base_file.parent,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        )

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


DRIVER = """\
import sys
from ebbtide.tune.job import run_sweep
from ebbtide.tune.space import read_sweep

result = run_sweep(read_sweep(sys.argv[1]), function=sys.argv[2])
print(min(trial.started_at_s for trial in result.trials))
"""


def driver(file: Path, function: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(file), f"trials:{function}"],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "did not come about in time"
        time.sleep(0.05)


def test_the_next_driver_finds_the_evaluators_warm(base_file: Path) -> None:
    text = LR + "num_samples: 2\n"
    run(base_file, text, "fine")
    warm = {(member["name"], member["zygote_pid"]) for member in pool_status()}
    assert len(warm) == 2
    called_at_s = time.time()
    process = driver(sweep_file(base_file, text), "fine")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert {(member["name"], member["zygote_pid"]) for member in pool_status()} == warm
    print(f"second driver: first trial after {float(output) - called_at_s:.2f} s")
    assert float(output) - called_at_s < 10


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
