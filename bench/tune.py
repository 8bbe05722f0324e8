"""Trials an hour: Ray Tune as it comes, with ``reuse_actors``, and on ebbtide's warm pool.

``python -m bench.tune [--short] [--json]``: every contender runs the same sweep of one-step trials
from a driver of its own on one cluster of two CPUs. All are timed alike, in two ways: ``Tuner.fit``
alone, and (``whole_...``) the driver's process from its start to its end. Then a driver of ours is
killed in the middle and called again: ``restored_reruns`` counts the finished trials that ran a
second time. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ebbtide.platform.local_cluster import LocalCluster

EVALUATORS = 2
JOB = """\
name: bench
storage: {folder}/runs
steps: 1
model: {{source: model.json}}
data: {{uri: data, sequence_length: 2}}
batch: {{global_sequences: 1, micro_sequences: 1}}
optimizer: {{lr: 1e-3}}
"""
SWEEP = """\
base: train.yaml
name: {name}
num_samples: {trials}
space: {{optimizer.lr: {{loguniform: [1e-4, 1e-2]}}}}
pool: {{size: {size}}}
"""


def ray_tune(contender: str, trials: int, folder: Path) -> dict[str, Any]:
    """Ray Tune's own way; its loggers are off here too, so that only the trials differ."""
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    import ray
    from ray import tune

    from bench import tune_trials

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    tuner = tune.Tuner(
        tune_trials.vanilla if contender == "vanilla" else tune_trials.reusable(),
        param_space={"optimizer.lr": tune.loguniform(1e-4, 1e-2)},
        tune_config=tune.TuneConfig(
            num_samples=trials,
            max_concurrent_trials=EVALUATORS,
            reuse_actors=contender == "reuse_actors",
        ),
        run_config=tune.RunConfig(
            name=contender,
            storage_path=str(folder),
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_at_end=False if contender == "reuse_actors" else None
            ),
        ),
    )
    started_s = time.monotonic()
    results = tuner.fit()
    fit_s = time.monotonic() - started_s
    return {"trials": len(results), "failed": results.num_errors, "fit_s": fit_s}


def ebbtide(contender: str, trials: int, folder: Path) -> dict[str, Any]:
    """Ours: the first sweep starts the pool, later ones find it warm."""
    from ebbtide.tune.job import run_sweep
    from ebbtide.tune.space import read_sweep

    (folder / "train.yaml").write_text(JOB.format(folder=folder))
    file = folder / f"{contender}.yaml"
    file.write_text(SWEEP.format(name=contender, trials=trials, size=EVALUATORS))
    body = "counted" if contender == "killed" else "pooled"
    result = run_sweep(read_sweep(file), function=f"bench.tune_trials:{body}")
    reports = [trial.reports[-1] for trial in result.trials if trial.reports]
    return {
        "trials": len(result.trials),
        "failed": len(result.failed),
        "fit_s": result.fit_s,
        "first_trial_at_s": min(report["at_s"] for report in reports),
        "body_s": sum(report["body_s"] for report in reports) / len(reports),
    }


def command(contender: str, trials: int, folder: Path) -> list[str]:
    options = ["--contender", contender, "--trials", str(trials), "--folder", str(folder)]
    return [sys.executable, "-m", "bench.tune", *options]


def restore(trials: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Kill a driver when a third of its trials have ended, call it again, look at the marks."""
    marks = folder / "marks"
    marks.mkdir()

    def ended() -> set[str]:
        return {path.stem for path in marks.glob("*.ended")}

    print(f"killed: {trials} trials", file=sys.stderr, flush=True)
    driver = subprocess.Popen(
        command("killed", trials, folder), env=environment, stdout=subprocess.DEVNULL
    )
    while len(ended()) < trials // 3 and driver.poll() is None:
        time.sleep(0.002)
    driver.kill()
    driver.wait()
    before = ended()
    found = drive("killed", trials, folder, environment)
    rerun = [name for name in before if (marks / f"{name}.started").stat().st_size > 1]
    return {**found, "killed_after": len(before), "reruns": len(rerun)}


def drive(contender: str, trials: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a contender in a process of its own; adds ``start_s``, process start to first trial."""
    print(f"{contender}: {trials} trials", file=sys.stderr, flush=True)
    called_at_s, started_s = time.time(), time.monotonic()
    run = subprocess.run(
        command(contender, trials, folder),
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    found["whole_s"] = time.monotonic() - started_s
    found["trials_per_hour"] = 3600 * found["trials"] / found["fit_s"]
    found["whole_trials_per_hour"] = 3600 * found["trials"] / found["whole_s"]
    if "first_trial_at_s" in found:
        found["start_s"] = found["first_trial_at_s"] - called_at_s
    print(f"{contender}: {found['trials_per_hour']:,.0f} an hour", file=sys.stderr, flush=True)
    return found


def measure(short: bool) -> dict[str, Any]:
    """Every contender once, and ours on a cold pool and on a warm one."""
    trials = 100
    with tempfile.TemporaryDirectory() as name, LocalCluster(1, cpus_per_node=2) as cluster:
        folder = Path(name)
        environment = {
            **cluster.environment,
            "RAY_ADDRESS": cluster.address,
            "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)]),
            "OMP_NUM_THREADS": "1",
        }
        vanilla = drive("vanilla", 8 if short else trials, folder, environment)
        reuse = drive("reuse_actors", trials, folder, environment)
        cold = drive("cold", trials, folder, environment)
        warm = drive("warm", trials, folder, environment)
        restored = restore(trials, folder, environment)
    overhead_s = warm["fit_s"] * EVALUATORS / warm["trials"] - warm["body_s"]

    def ratio(figure: str, other: dict[str, Any]) -> float:
        return round(warm[figure] / other[figure], 2)

    return {
        "bench": "tune",
        "trials": trials,
        "trials_per_hour": round(warm["trials_per_hour"]),
        "cold_trials_per_hour": round(cold["trials_per_hour"]),
        "vanilla_trials_per_hour": round(vanilla["trials_per_hour"]),
        "reuse_actors_trials_per_hour": round(reuse["trials_per_hour"]),
        "vs_vanilla": ratio("trials_per_hour", vanilla),
        "vs_reuse_actors": ratio("trials_per_hour", reuse),
        "whole_trials_per_hour": round(warm["whole_trials_per_hour"]),
        "whole_vs_vanilla": ratio("whole_trials_per_hour", vanilla),
        "whole_vs_reuse_actors": ratio("whole_trials_per_hour", reuse),
        "first_sweep_start_s": round(cold["start_s"], 3),
        "second_sweep_start_s": round(warm["start_s"], 3),
        "overhead_ms_per_trial": round(1000 * overhead_s, 2),
        "restored_reruns": restored["reruns"],
        "restored_after_trials": restored["killed_after"],
        "failed": sum(each["failed"] for each in (vanilla, reuse, cold, warm, restored)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer trials of the slow contender")
    parser.add_argument("--json", action="store_true", help="only the JSON line on stdout")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--trials", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        contend = ebbtide if options.contender in ("cold", "warm", "killed") else ray_tune
        print(json.dumps(contend(options.contender, options.trials, options.folder)))
        return
    found = measure(options.short)
    if not options.json:
        for key, value in found.items():
            print(f"{key:>30} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
