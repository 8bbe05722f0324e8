"""Evaluators with their real zygote and children, without Ray around them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ebbtide.tune.evaluator import Evaluator
from ebbtide.tune.nursery import WARM_UP, Nursery
from ebbtide.tune.sharing import Lease
from ebbtide.tune.trial import TrialRequest
from tests.tune.trials import MISDEEDS

FOLDER = Path(__file__).parent
LEASE = Lease("sweep", "job")
COLD = "os:getpid"
"""What a zygote does that imports nothing, and so starts at once."""


class Bench:
    """One evaluator and the event loop it lives on."""

    def __init__(self, runner: asyncio.Runner, warm_up: str = WARM_UP) -> None:
        self.runner = runner
        self.dead_jobs: set[str] = set()
        self.nursery = Nursery(warm_up)
        self.evaluator = Evaluator({}, self.dead_jobs.__contains__, self.nursery)
        self._numbers = iter(range(10**6))

    def do(self, work: Awaitable[Any]) -> Any:
        async def within() -> Any:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(within())

    def request(
        self, function: str, values: dict[str, Any] | None = None, marks: Path = FOLDER
    ) -> TrialRequest:
        values = values or {}
        return TrialRequest(
            trial_id=f"trial-{next(self._numbers)}",
            function=f"trials:{function}",
            base={"seed": 3, "steps": 4, "data": {"uri": str(marks)}},
            values=values,
            metric="validation_loss",
            timeout_s=1.0 if values.get("seed") == MISDEEDS.index("hangs") else 60.0,
            cwd=str(FOLDER),
        )

    def run(
        self, function: str, values: dict[str, Any] | None = None, marks: Path = FOLDER
    ) -> list[dict[str, Any]]:
        """A whole trial; its results. Raises TrialFailed."""

        async def whole() -> list[dict[str, Any]]:
            request = self.request(function, values, marks)
            results = [await self.evaluator.begin("sweep", request)]
            while not results[-1]["done"]:
                results.append(await self.evaluator.next_result("sweep", request.trial_id))
            await self.evaluator.stop("sweep", request.trial_id)
            return results

        found: list[dict[str, Any]] = self.do(whole())
        return found

    def misbehave(self, kind: str, marks: Path) -> list[dict[str, Any]]:
        return self.run("misbehave", {"seed": MISDEEDS.index(kind)}, marks)


@contextlib.contextmanager
def open_bench(warm_up: str) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        made = Bench(runner, warm_up)
        made.do(made.evaluator.acquire(LEASE))
        try:
            yield made
        finally:
            made.nursery.close()


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "did not come about in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"
