"""A rank's surroundings, as far as they can be seen without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import ray
import torch

from ebbtide.platform.clock import SystemClock
from ebbtide.platform.meter import Meter, Owner
from ebbtide.train.desk import Desk
from ebbtide.train.events import Step
from ebbtide.train.step import StepResult
from ebbtide.train.surroundings import LeaveWatch, RaySurroundings, samples_digest
from ebbtide.train.trial import single_process_group
from tests.train.conftest import Remote


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
        surroundings = RaySurroundings(Remote(desk), attempt, meter, ["a", "b"])
        surroundings.on_step(result)
        assert surroundings.should_leave(3) is None
        surroundings.close()
    (event,) = desk.take()[0]
    assert isinstance(event, Step)
    assert (event.attempt, event.step, event.loss) == (attempt, 3, 2.5)
    assert event.samples == samples_digest([4, 5])
    assert event.seconds == {"compute": 0.25}
