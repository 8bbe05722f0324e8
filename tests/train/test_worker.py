"""A rank's surroundings, as far as they can be seen without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from ebbtide.platform.clock import SystemClock
from ebbtide.platform.errors import DataError
from ebbtide.platform.meter import Meter, Owner
from ebbtide.train import worker
from ebbtide.train.desk import Desk
from ebbtide.train.events import Step
from ebbtide.train.failures import UserCrash
from ebbtide.train.step import StepResult
from ebbtide.train.trial import single_process_group
from ebbtide.train.worker import LeaveWatch, RankSpec, RaySurroundings, samples_digest
from tests.train.conftest import MakeConfig
from tests.train.test_controller import Remote


def test_a_reason_to_leave_is_seen_in_the_background_and_kept() -> None:
    answers: Iterator[str | None] = iter([None, None, "notice: x"])
    asked = threading.Event()

    def ask() -> str | None:
        answer = next(answers)
        if answer is not None:
            asked.set()
        return answer

    watch = LeaveWatch(ask, interval_s=0.001)
    assert asked.wait(10)
    watch.close()
    assert watch.reason == "notice: x"


def test_the_digest_of_samples_depends_on_their_order() -> None:
    assert samples_digest([1, 2, 3]) == samples_digest([1, 2, 3])
    assert samples_digest([1, 2, 3]) != samples_digest([1, 3, 2])


def test_the_first_rank_tells_the_desk_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda value, **_: value)
    desk = Desk()
    attempt = desk.begin(["a"])
    desk.take()
    result = StepResult(
        step=3,
        loss=2.5,
        grad_norm=1.5,
        lr=1e-3,
        tokens=64,
        epoch=0,
        sample_ids=[4, 5],
        seconds={Owner.COMPUTE: 0.25},
    )
    with single_process_group(torch.device("cpu")):
        meter = Meter(SystemClock())
        surroundings = RaySurroundings(Remote(desk), attempt, meter, torch.device("cpu"))
        surroundings.on_step(result)
        assert surroundings.should_leave(3) is None
        surroundings.close()
    (event,) = desk.take()[0]
    assert isinstance(event, Step)
    assert (event.attempt, event.step, event.loss) == (attempt, 3, 2.5)
    assert event.samples == samples_digest([4, 5])
    assert event.seconds == {"compute": 0.25}


@pytest.mark.parametrize("error", [DataError("shard"), ValueError("boom")])
def test_errors_leave_a_rank_in_a_form_that_travels(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: RankSpec) -> None:
        raise error

    monkeypatch.setattr(worker, "run_rank", fail)
    function = worker.train_function(RankSpec(make_config(), "/", {}))
    with pytest.raises(Exception) as raised:
        function()
    assert type(raised.value) is (DataError if isinstance(error, DataError) else UserCrash)
    assert str(error) in str(raised.value)


def test_secrets_are_not_shown(make_config: MakeConfig) -> None:
    spec: Any = RankSpec(make_config(), "/", {"AWS_SECRET_ACCESS_KEY": "hidden"})
    assert "hidden" not in repr(spec)
