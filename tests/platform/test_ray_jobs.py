"""Following jobs over a connection that breaks; the client is replaced, the cluster is not needed.

Real jobs are submitted in ``tests/commands/test_submit.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.job_submission

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.errors import ClusterError, ConfigError
from ebbtide.platform.ray_jobs import RayJobs

LOG = "one\ntwo\nthree\n"


class Client:
    """A cluster with one job, whose log's connection breaks ``breaks`` times."""

    def __init__(self, address: str) -> None:
        self.submitted: list[dict[str, Any]] = []
        self.breaks = 2
        self.polls_left = 3
        self.known: set[str] = set()
        self.refuse: Exception | None = None

    def submit_job(self, **arguments: Any) -> str:
        if self.refuse is not None:
            raise self.refuse
        name = arguments["submission_id"] or "made-up"
        if name in self.known:
            raise RuntimeError(f"Job with submission_id {name} already exists.")
        self.known.add(name)
        self.submitted.append(arguments)
        return str(name)

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        yield LOG[:5]
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("WebSocket connection closed unexpectedly")
        yield LOG[5:]

    def get_job_info(self, job_id: str) -> Any:
        self.polls_left -= 1
        ended = self.polls_left <= 0
        status = SimpleNamespace(is_terminal=lambda: ended, value="FAILED")
        return SimpleNamespace(status=status, driver_exit_code=7, message="it failed")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> RayJobs:
    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", Client)
    return RayJobs("http://head:8265", FakeClock())


def test_a_log_is_written_once_however_often_its_connection_breaks(jobs: RayJobs) -> None:
    written: list[str] = []
    outcome = jobs.follow("job", written.append)
    assert "".join(written) == LOG
    assert (outcome.status, outcome.exit_code, outcome.succeeded) == ("FAILED", 7, False)


def test_a_job_of_the_same_name_is_submitted_once(jobs: RayJobs) -> None:
    assert jobs.submit(["python", "a b.py"], Path("/code"), "mine") == ("mine", True)
    assert jobs.submit(["python", "a b.py"], Path("/code"), "mine") == ("mine", False)
    (job,) = jobs._client.submitted
    assert job["entrypoint"] == "python 'a b.py'"
    assert job["runtime_env"]["working_dir"] == "/code"
    assert ".venv" in job["runtime_env"]["excludes"]


def test_refusals_are_told(jobs: RayJobs) -> None:
    jobs._client.refuse = RuntimeError("no room")
    with pytest.raises(ClusterError, match="not accepted: no room"):
        jobs.submit(["x"], Path("/code"), None)
    jobs._client.refuse = ValueError("package is 900 MB")
    with pytest.raises(ConfigError, match="cannot be sent"):
        jobs.submit(["x"], Path("/code"), None)


def test_an_address_is_the_dashboards() -> None:
    with pytest.raises(ConfigError, match="write the dashboard's http"):
        RayJobs("head:6379")
