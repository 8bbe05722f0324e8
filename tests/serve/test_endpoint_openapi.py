"""Data against the description that the endpoint gives of itself: refused, and never its fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import Endpoint
from tests.serve.served import measured

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

_NUM_CASES = 2000


def statuses(endpoint: Endpoint) -> dict[str, float]:
    """How many requests have been answered with each status."""
    found: dict[str, float] = {}
    for name, value in measured(endpoint).items():
        if name.startswith("ebbtide_requests_total{"):
            status = name.rpartition('status="')[2].rstrip('"}')
            found[status] = found.get(status, 0) + value
    return found


def test_no_data_against_its_description_makes_it_fail(endpoint: Endpoint, tmp_path: Path) -> None:
    base, before = endpoint.url.removesuffix("/v1"), statuses(endpoint)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{base}/openapi.json"]
    command += ["--url", base, "--mode", "negative", "--checks", "not_a_server_error"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "300", "--seed", "1"]
    command += ["--no-shrink", "--continue-on-failure"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    new = {status: number - before.get(status, 0) for status, number in statuses(endpoint).items()}
    print(done.stdout[-1500:])
    print(f"answered by status: {new}")
    assert sum(new.values()) >= _NUM_CASES
    assert not any(number for status, number in new.items() if status.startswith("5"))
