"""NIXL's progress thread sleeps. Fails by name when a NIXL release changes what is replaced."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import os, time
from pathlib import Path
from ebbtide.serve import nixl_progress
from nixl._api import nixl_agent, nixl_agent_config

def awake(samples=40):
    "How often some thread but this one wants the processor, whatever else runs on the machine."
    seen = 0
    for _ in range(samples):
        others = [t for t in Path("/proc/self/task").iterdir() if int(t.name) != os.getpid()]
        seen += any((t / "stat").read_text().rpartition(")")[2].split()[0] == "R" for t in others)
        time.sleep(0.02)
    return seen / samples

agent = nixl_agent("stock", nixl_agent_config(backends=["UCX"]))
print("stock", awake())
del agent
assert nixl_progress.install(), "NIXL has changed; see nixl_progress.install"
assert nixl_progress.install(), "a second call changes nothing"
agent = nixl_agent("patient", nixl_agent_config(backends=["UCX"]))
print("patient", awake())
"""


@pytest.mark.vllm
def test_an_idle_agent_sleeps() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    awake = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert float(awake["stock"]) > 0.95, "NIXL does not spin any more: remove nixl_progress.py"
    assert float(awake["patient"]) < 0.8  # waiting for a busy processor counts as awake
