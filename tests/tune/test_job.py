"""Whole sweeps on a real cluster: isolation, faults, the next driver, the next sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyarrow import parquet

from ebbtide.platform.config import load
from ebbtide.platform.errors import AlreadyExists, ClusterError, TuneError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train import preflight
from ebbtide.train.config import TrainConfig
from ebbtide.train.ray_connection import connected
from ebbtide.train.trial import run_trial
from ebbtide.tune.job import run_sweep
from ebbtide.tune.results import SweepResult, Trial
from ebbtide.tune.space import read_sweep
from tests.train.conftest import MakeConfig, Tiny
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
    from ebbtide.tune import members

    with connected(cluster_session.address):
        members.down("ebbtide-pool")


def sweep_file(base_file: Path, text: str) -> Path:
    path = base_file.parent / "tune.yaml"
    path.write_text("base: train.yaml\n" + text)
    return path


def run(base_file: Path, text: str, function: str, **options: Any) -> SweepResult:
    sweep = read_sweep(sweep_file(base_file, text))
    return run_sweep(sweep, function=f"trials:{function}", **options)


def pool_status() -> list[dict[str, Any]]:
    from ebbtide.tune import members

    with connected():
        return members.status("ebbtide-pool")


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
    again = run(base_file, text + "concurrency: 1\nname: again\n", "torch_fit")

    def losses(result: SweepResult) -> dict[float, list[float]]:
        return {
            trial.values["optimizer.lr"]: [report["validation_loss"] for report in trial.reports]
            for trial in result.trials
        }

    assert losses(first) == losses(again)
    assert first.best is not None and again.best is not None
    assert first.best.metric == again.best.metric


def test_a_finished_sweep_is_not_run_again(base_file: Path) -> None:
    text = LR + "num_samples: 2\n"
    first = run(base_file, text, "fine")
    again: list[Trial] = []
    assert run(base_file, text, "raises", on_trial=again.append) == first  # not looked at
    assert not again


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


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )


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
    process = driver(sweep_file(base_file, text + "name: second\n"), "fine")
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


FUNCTION = """\
function: trials:{name}
storage: {folder}/runs
metric: loss
pool: {{namespace: ebbtide-pool}}
"""


def run_function(folder: Path, name: str, text: str) -> SweepResult:
    path = folder / "function.yaml"
    path.write_text(FUNCTION.format(name=name, folder=folder) + text)
    return run_sweep(read_sweep(path))


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


def test_a_budget_ends_the_sweep_with_the_best_so_far_and_more_of_it_continues(
    tmp_path: Path,
) -> None:
    text = """\
num_samples: 60
space: {width: {uniform: [0, 1]}}
overrides: {rounds: 3, pause_s: 0.1}
cost: {instance_type: local-cpu}
"""
    short = run_function(tmp_path, "user", text + "max_dollars: 0.000035\n")
    assert short.status == "budget" and short.limit == "max_dollars ($0.000035) is spent"
    assert short.usd is not None and short.usd >= Decimal("0.000035") and not short.partial
    costs = [trial.usd for trial in short.trials if trial.status == "finished"]
    assert all(usd is not None and 0 < usd < short.usd for usd in costs)
    again = run_function(tmp_path, "user", text + "max_dollars: 0.000035\n")
    assert again == short
    whole = run_function(tmp_path, "user", text + "max_seconds: 600\n")
    assert whole.status == "finished" and whole.limit is None
    assert [trial.status for trial in whole.trials] == ["finished"] * 60
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

    alone = run(base_file, text("alone"), "counted")

    def outcome(of: SweepResult) -> list[tuple[Any, ...]]:
        return [
            (trial.number, trial.values, trial.status, trial.metric, trial.reports)
            for trial in of.trials
        ]

    assert outcome(result) == outcome(alone)
    assert {trial.status for trial in result.trials} == {"finished", "stopped"}


def test_a_sweep_of_higher_priority_goes_first_and_the_other_goes_on(base_file: Path) -> None:
    marks = base_file.parent / "marks"
    space = "space: {seed: {int: [0, 1000000]}}\nsteps: 6\n"
    text = f"{space}num_samples: 500\nname: long\noverrides: {{data.uri: {marks}"
    text += ", schedule.warmup_steps: 0}\n"
    process = driver(sweep_file(base_file, text), "counted")
    try:
        wait_for(lambda: len(list(marks.glob("finished-*"))) >= 2, 60)
        first = run(base_file, LR + "num_samples: 4\npool: {priority: 1}\n", "fine")
        assert len(first.trials) == 4 and not first.failed
        assert process.poll() is None
        ended = len(list(marks.glob("finished-*")))
        wait_for(lambda: len(list(marks.glob("finished-*"))) > ended + 3, 60)
    finally:
        process.kill()
        process.wait()
    assert {path.stat().st_size for path in marks.glob("started-*")} == {1}


def test_an_idle_pool_shrinks_to_its_minimum(cluster: LocalCluster) -> None:
    arguments = ["--namespace", "idle", "--address", cluster.address]
    wanted = ["--size", "2", "--min", "1", "--idle-timeout", "1", "--json"]
    found = program("-m", "ebbtide", "tune", "pool", "up", *wanted, *arguments)
    assert found.returncode == 0
    assert [member["name"] for member in json.loads(found.stdout)][0] == "evaluator-0"
    from ebbtide.tune import members

    with connected():
        wait_for(lambda: [each["name"] for each in members.status("idle")] == ["evaluator-0"])
        assert members.down("idle") == 1
