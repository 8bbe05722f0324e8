"""What a trial finds is what it would find in a process of its own, whatever ran before it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from ebbtide.tune.nursery import WARM_UP
from tests.tune.evaluators import FOLDER, Bench, open_bench


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench(WARM_UP) as made:
        yield made


def test_a_trial_here_equals_one_in_a_fresh_process(bench: Bench) -> None:
    here = [result["validation_loss"] for result in bench.run("torch_fit", {"optimizer.lr": 0.1})]
    program = (
        "import trials\n"
        "losses = []\n"
        "final = trials.torch_fit({'seed': 3}, {'optimizer.lr': 0.1},"
        " lambda m: losses.append(m['validation_loss']))\n"
        "print(losses + [final['validation_loss']])"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", program],
        cwd=FOLDER,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert fresh.stdout.strip() == str(here)


LEFT = [
    "environment",
    "module",
    "builtin",
    "dtype",
    "folder",
    "threads",
    "decimals",
    "gradients",
    "signals",
    "path",
]


@pytest.mark.parametrize("kind", LEFT)
def test_a_trial_leaves_nothing_behind(bench: Bench, kind: str) -> None:
    first, second = (bench.run("leaky", {"kind": kind})[-1] for _ in range(2))
    assert first["validation_loss"] == second["validation_loss"] == 0.0
    assert all(first[name] != second[name] for name in ("python", "numpy", "torch"))


def test_a_trial_is_the_same_in_any_order(bench: Bench) -> None:
    def losses(rates: Sequence[float]) -> dict[float, list[float]]:
        found = {}
        for rate in rates:
            bench.run("leaky", {"kind": "dtype"})
            results = bench.run("torch_fit", {"optimizer.lr": rate})
            found[rate] = [result["validation_loss"] for result in results]
        return found

    rates = (0.1, 0.01, 0.001)
    assert losses(rates) == losses(rates[::-1])
