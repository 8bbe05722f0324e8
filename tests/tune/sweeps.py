"""Sweeps on the session's cluster, in this process and in drivers of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ebbtide.train.ray_connection import connected
from ebbtide.tune.job import run_sweep
from ebbtide.tune.results import SweepResult
from ebbtide.tune.space import read_sweep

FOLDER = Path(__file__).parent


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


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )


DRIVER = """\
import sys
from ebbtide.tune.job import run_sweep
from ebbtide.tune.space import read_sweep

result = run_sweep(read_sweep(sys.argv[1]), function=sys.argv[2] or None)
print(min(trial.started_at_s for trial in result.trials))
"""


def driver(file: Path, function: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(file), function and f"trials:{function}"],
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


FUNCTION = """\
function: trials:{name}
storage: {folder}/runs
metric: loss
pool: {{namespace: ebbtide-pool}}
"""


def function_file(folder: Path, name: str, text: str) -> Path:
    path = folder / "function.yaml"
    path.write_text(FUNCTION.format(name=name, folder=folder) + text)
    return path


def run_function(folder: Path, name: str, text: str) -> SweepResult:
    return run_sweep(read_sweep(function_file(folder, name, text)))
