"""Trials that fail, and evaluators that lose their zygote, or end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbtide.tune.running import TrialFailed
from tests.tune.evaluators import COLD, FOLDER, Bench, alive, open_bench, wait_for


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with open_bench(COLD) as made:
        yield made


def test_a_trial_that_takes_too_much_memory_fails_alone(bench: Bench) -> None:
    request = replace(bench.request("hoards"), memory_bytes=1 << 30)
    with pytest.raises(TrialFailed, match=r"out of memory \(trial_memory_gb is 1\.07\)"):
        bench.do(bench.evaluator.begin("sweep", request))
    assert bench.run("fine", {"optimizer.lr": 0.01})[-1]["validation_loss"] == 0.0


@pytest.mark.parametrize(
    ("kind", "reason", "may_retry"),
    [
        ("raises", "ValueError: the learning rate is cursed", False),
        ("is nan", "validation_loss is nan", False),
        ("is inf", "validation_loss is inf", False),
        ("always exits", "the trial's process ended with exit code 3", True),
        ("sys.exits once", "the trial called sys.exit(0)", True),
        ("is killed", "was killed by SIGKILL (out of memory?)", True),
        ("hangs", "the trial passed its time-out of 1 s", False),
    ],
)
def test_a_trial_fails_alone_and_says_why(
    bench: Bench, tmp_path: Path, kind: str, reason: str, may_retry: bool
) -> None:
    with pytest.raises(TrialFailed) as failure:
        bench.misbehave(kind, tmp_path)
    assert reason in str(failure.value)
    assert failure.value.may_retry == may_retry
    assert bench.misbehave("behaves", tmp_path)[-1]["validation_loss"] == 0.2


def test_what_a_trial_started_ends_with_it(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="exit code 4"):
        bench.misbehave("leaves a process", tmp_path)

    def left() -> bool:
        found = subprocess.run(["pgrep", "-f", "left-behind"], capture_output=True)
        return found.returncode == 0

    wait_for(lambda: not left())


def test_a_dead_zygote_is_replaced(bench: Bench, tmp_path: Path) -> None:
    before = bench.nursery.zygotes_started
    with pytest.raises(TrialFailed) as failure:
        bench.misbehave("kills the zygote", tmp_path)
    assert failure.value.may_retry
    assert bench.misbehave("behaves", tmp_path)[-1]["validation_loss"] == 0.2
    assert bench.nursery.zygotes_started == before + 1


def test_children_end_when_the_evaluator_does(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from ebbtide.tune.nursery import Nursery\n"
        "from ebbtide.tune.trial import TrialRequest\n"
        "async def main():\n"
        "    nursery = Nursery('os:getpid')\n"
        "    child = await nursery.child()\n"
        "    base = {'data': {'uri': sys.argv[1]}}\n"
        "    request = TrialRequest('t', 'trials:slow', base, {}, 'x', 9)\n"
        "    child.writer.write(request.line())\n"
        "    print(nursery.zygote_pid, child.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert all(alive(pid) for pid in pids)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids))
