"""Jobs on a Ray cluster that is reached through its dashboard: submit, follow, outcome.

Promises: a job is submitted at most once under a name; following can stop and start again at any
time without touching the job; the outcome is the job's own, also when the connection breaks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbtide.platform.clock import Clock, SystemClock
from ebbtide.platform.errors import ClusterError, ConfigError

logger = logging.getLogger(__name__)

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_POLL_S = 1.0
_EXCLUDES = (".git", ".venv", "venv", ".ebbtide", "__pycache__", "*.egg-info", ".*_cache")


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended. ``exit_code`` is its driver's, as far as Ray knows it."""

    job_id: str
    status: str
    exit_code: int | None
    message: str

    @property
    def succeeded(self) -> bool:
        return self.status == "SUCCEEDED"


class RayJobs:
    """The jobs of one cluster. Raises ClusterError if the dashboard does not answer."""

    def __init__(self, address: str | None = None, clock: Clock | None = None) -> None:
        from ray.job_submission import JobSubmissionClient

        self.address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS
        if not self.address.startswith(("http://", "https://")):
            raise ConfigError(f"{self.address}: write the dashboard's http://host:port")
        self._clock = clock or SystemClock()
        try:
            self._client: Any = JobSubmissionClient(self.address)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f"{self.address}: no Ray dashboard answers there; is the cluster up, with "
                f"ray[default], and the address right? ({error})"
            ) from error

    def submit(
        self, command: Sequence[str], working_dir: Path, name: str | None
    ) -> tuple[str, bool]:
        """Start a job; its id, and whether it is new (a job of this name may be there already).

        The working directory travels without virtual environments and what git ignores.
        """
        import shlex

        try:
            job_id = self._client.submit_job(
                entrypoint=shlex.join(command),
                submission_id=name,
                runtime_env={"working_dir": str(working_dir), "excludes": list(_EXCLUDES)},
            )
        except RuntimeError as error:
            if name is not None and "already exists" in str(error):
                return name, False
            raise ClusterError(f"{self.address}: the job was not accepted: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{working_dir}: cannot be sent to the cluster: {error}") from error
        return str(job_id), True

    def follow(self, job_id: str, write: Callable[[str], None]) -> JobOutcome:
        """Write the job's log as it grows, from its start, until the job has ended."""
        written = 0
        while True:
            written = asyncio.run(self._tail(job_id, write, written))
            outcome = self.outcome(job_id)
            if outcome is not None:
                return outcome
            self._clock.sleep(_POLL_S)

    def outcome(self, job_id: str) -> JobOutcome | None:
        """How the job ended; None while it has not."""
        try:
            info = self._client.get_job_info(job_id)
        except (ConnectionError, RuntimeError) as error:
            raise ClusterError(
                f"{self.address}: job {job_id} cannot be asked for: {error}"
            ) from error
        if not info.status.is_terminal():
            return None
        return JobOutcome(job_id, info.status.value, info.driver_exit_code, info.message or "")

    def stop(self, job_id: str) -> None:
        """Ask the job to stop."""
        self._client.stop_job(job_id)

    async def _tail(self, job_id: str, write: Callable[[str], None], written: int) -> int:
        """Follow until the connection ends; skips what is written. How much there is now."""
        seen = 0
        try:
            async for chunk in self._client.tail_job_logs(job_id):
                seen += len(chunk)
                if seen > written:
                    write(chunk[max(0, len(chunk) - (seen - written)) :])
                    written = seen
        except (RuntimeError, OSError) as error:
            logger.debug("the log's connection ended: %s", error)
        return written
