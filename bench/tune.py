"""Trials an hour: Ray Tune as it comes, with ``reuse_actors``, and on ebbtide's warm pool.

``python -m bench.tune [--short] [--json]``: every contender runs the same sweep of one-step trials
from a driver of its own on one cluster of two CPUs, ours by its command (``ebbtide tune FILE``).
All are timed alike, in two ways: ``Tuner.fit`` alone, and (``whole_...``) the driver's process from
its start to its end. ``second_sweep_start_s`` is from the start of the command's process, before
Python is up, to the first line of the first trial's own code, on a pool that an earlier sweep has
left; the median of three sweeps. Then a driver of ours is killed in the middle and called again:
``restored_reruns`` counts the trials that had done all their work at the kill, though neither had
returned nor been heard of yet, and ran a second time.

Last comes a sweep of real trainings, with ASHA (:mod:`bench.tune_training`): ``training_to_best_s``
is from the start of the command to the first report of a loss that both sweeps reach,
``training_usd`` what the node costs in that time. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import tune_training
from ebbtide.platform.local_cluster import LocalCluster

EVALUATORS = 2
SWEEP = """\
function: bench.tune_trials:{function}
storage: {folder}/runs
name: {name}
num_samples: {trials}
metric: loss
overrides: {{marks: {folder}/marks}}
space: {{lr: {{loguniform: [1e-4, 1e-2]}}}}
pool: {{size: {size}}}
"""
WARM_SWEEPS = 3


def ray_tune(contender: str, trials: int, folder: Path) -> dict[str, Any]:
    """Ray Tune's own way; its loggers are off here too, so that only the trials differ."""
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    import ray
    from ray import tune

    from bench import tune_trials

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    tuner = tune.Tuner(
        tune_trials.vanilla if contender == "vanilla" else tune_trials.reusable(),
        param_space={"lr": tune.loguniform(1e-4, 1e-2)},
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


def command(contender: str, trials: int, folder: Path) -> list[str]:
    """Ray Tune's in a process of this module, ours as a user types it."""
    if contender in ("vanilla", "reuse_actors", "training"):
        options = ["--contender", contender, "--trials", str(trials), "--folder", str(folder)]
        return [sys.executable, "-m", "bench.tune", *options]
    function = "counted" if contender == "killed" else "pooled"
    file = folder / f"{contender}.yaml"
    file.write_text(
        SWEEP.format(
            name=contender, trials=trials, size=EVALUATORS, folder=folder, function=function
        )
    )
    return [sys.executable, "-m", "ebbtide", "tune", str(file), "--json"]


def of_ours(result: dict[str, Any]) -> dict[str, Any]:
    """What counts in the document that our command prints."""
    reports = [trial["reports"][-1] for trial in result["trials"] if trial["reports"]]
    return {
        "trials": len(result["trials"]),
        "failed": result["failed"],
        "fit_s": result["fit_s"],
        "first_trial_at_s": min(report["at_s"] for report in reports),
        "body_s": sum(report["body_s"] for report in reports) / len(reports),
    }


def drive(contender: str, trials: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run a contender in a process of its own; adds ``start_s``, process start to first trial."""
    print(f"{contender}: {trials} trials", file=sys.stderr, flush=True)
    order = command(contender, trials, folder)
    called_at_s, started_s = time.time(), time.monotonic()
    run = subprocess.run(order, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    whole_s = time.monotonic() - started_s
    if contender in ("vanilla", "reuse_actors"):
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    else:
        found = of_ours(json.loads(run.stdout))
        found["start_s"] = found["first_trial_at_s"] - called_at_s
    found["whole_s"] = whole_s
    found["trials_per_hour"] = 3600 * found["trials"] / found["fit_s"]
    found["whole_trials_per_hour"] = 3600 * found["trials"] / found["whole_s"]
    print(f"{contender}: {found['trials_per_hour']:,.0f} an hour", file=sys.stderr, flush=True)
    return found


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


def train(short: bool, folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """The same sweep of trainings twice; ours on the pool that the sweeps before have left."""
    size = tune_training.Size(6, 18) if short else tune_training.Size(12, 81)
    tune_training.write_job(folder, size)

    def timed(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        called_at_s = time.time()
        found = run()
        return {**found, "called_at_s": called_at_s, "whole_s": time.time() - called_at_s}

    def theirs() -> dict[str, Any]:
        order = [*command("training", size.trials, folder), "--steps", str(size.steps)]
        run = subprocess.run(order, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
        return found

    print(f"training: {size.trials} trials, Ray Tune", file=sys.stderr, flush=True)
    vanilla = timed(theirs)
    print(f"training: {size.trials} trials, ebbtide", file=sys.stderr, flush=True)
    ours = timed(lambda: tune_training.ebbtide(size, folder, environment))
    failed = ours["failed"] + vanilla["failed"]
    return {**tune_training.figures(ours, vanilla), "training_failed": failed}


def measure(short: bool) -> dict[str, Any]:
    """Every contender once; ours on a cold pool, and again on the warm one."""
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
        sweeps = [
            drive(f"warm-{number}", trials, folder, environment) for number in range(WARM_SWEEPS)
        ]
        warm = sorted(sweeps, key=lambda sweep: sweep["trials_per_hour"])[WARM_SWEEPS // 2]
        restored = restore(trials, folder, environment)
        training = train(short, folder, environment)
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
        "second_sweep_start_s": round(statistics.median(each["start_s"] for each in sweeps), 3),
        "second_sweep_starts_s": [round(each["start_s"], 3) for each in sweeps],
        "overhead_ms_per_trial": round(1000 * overhead_s, 2),
        "restored_reruns": restored["reruns"],
        "restored_after_trials": restored["killed_after"],
        "failed": sum(each["failed"] for each in (vanilla, reuse, cold, *sweeps, restored)),
        **training,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="fewer, shorter trials of the slow")
    parser.add_argument("--json", action="store_true", help="only the JSON line on stdout")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--trials", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        if options.contender == "training":
            size = tune_training.Size(options.trials, options.steps)
            print(json.dumps(tune_training.ray_tune(size, options.folder)))
        else:
            print(json.dumps(ray_tune(options.contender, options.trials, options.folder)))
        return
    found = measure(options.short)
    if not options.json:
        for key, value in found.items():
            print(f"{key:>30} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
