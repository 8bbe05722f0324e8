"""States of trials handed from one to another, without an evaluator around them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.tune.nursery import Nursery
from ebbtide.tune.running import TrialFailed
from ebbtide.tune.stage import Stage
from ebbtide.tune.trial import TrialRequest

FOLDER = Path(__file__).parent


def test_a_trial_goes_on_from_a_state_and_one_that_is_lost_is_made_again(tmp_path: Path) -> None:
    first = TrialRequest(
        trial_id="first",
        function="trials:climbs",
        base={"marks": str(tmp_path), "rounds": 4},
        values={"speed": 1.0},
        metric="loss",
        timeout_s=60,
        cwd=str(FOLDER),
        is_user=True,
    )
    second = replace(first, trial_id="second", values={"speed": 10.0})
    lineage = [({"speed": 1.0}, 2)]

    async def story() -> list[tuple[Any, Any]]:
        nursery = Nursery("os:getpid")
        here, there = Stage(nursery), Stage(nursery)
        try:
            trial = await here.begin(first, None)
            await here.next_result(trial)
            await here.next_result(trial)
            path = await here.save(trial, "state")
            content = here.state("state")
            found = []
            for request, state in (
                (second, path),
                (second, content),
                (replace(second, lineage=lineage), "/proc/1/fd/never"),
                (replace(second, lineage=lineage, skip=1), None),
            ):
                result = await there.next_result(await there.begin(request, state))
                found.append((result["step"], result["loss"]))
            here.drop(["state"])
            assert here.state("state") is None
            return found
        finally:
            here.clear()
            there.clear()
            nursery.close()

    async def limited() -> list[tuple[Any, Any]]:
        return await asyncio.wait_for(story(), 60)

    went_on = (3, 1000 - 2 - 10)
    assert asyncio.run(limited()) == [went_on, went_on, went_on, (4, 1000 - 2 - 20)]


def test_a_trial_without_a_state_says_so(tmp_path: Path) -> None:
    request = TrialRequest(
        trial_id="one",
        function="trials:user",
        base={},
        values={"width": 1.0},
        metric="loss",
        timeout_s=60,
        cwd=str(FOLDER),
        is_user=True,
    )

    async def story() -> None:
        nursery = Nursery("os:getpid")
        stage = Stage(nursery)
        try:
            trial = await stage.begin(request, None)
            await stage.next_result(trial)
            with pytest.raises(TrialFailed, match=r"give it to context\.report as state"):
                await stage.save(trial, "state")
            assert (await stage.next_result(trial))["step"] == 2
        finally:
            stage.clear()
            nursery.close()

    asyncio.run(story())
