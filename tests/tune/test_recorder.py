"""What becomes of each trial, told call by call."""

from __future__ import annotations

import contextlib
from decimal import Decimal

import pytest

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.config import parse
from ebbtide.tune.config import TuneConfig
from ebbtide.tune.past import Past
from ebbtide.tune.recorder import Recorder
from ebbtide.tune.results import Trial
from ebbtide.tune.running import TrialFailed

CONFIG = parse("base: b\nmetric: loss\nnum_samples: 3\nspace: {seed: {int: [0, 9]}}", TuneConfig)


@pytest.fixture
def ended() -> list[Trial]:
    return []


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def recorder(clock: FakeClock, ended: list[Trial]) -> Recorder:
    return Recorder(CONFIG, 9, clock, ended.append)


def test_a_trial_that_finishes(recorder: Recorder, clock: FakeClock, ended: list[Trial]) -> None:
    recorder.started("a", {"seed": 1})
    recorder.reported("a", {"step": 1, "loss": 2.0}, finished=False, seconds=2.5)
    clock.sleep(5)
    recorder.reported("a", {"step": 2, "loss": 1.0}, finished=False, seconds=2.5)
    recorder.reported("a", {"step": 2, "loss": 1.0}, finished=True, seconds=2.5)
    recorder.completed("a")
    (trial,) = recorder.trials
    assert ended == [trial]
    assert (trial.status, trial.metric, trial.seconds, trial.tries) == ("finished", 1.0, 5.0, 1)
    assert [report["step"] for report in trial.reports] == [1, 2]


def test_a_trial_that_the_scheduler_stops_keeps_its_metric(recorder: Recorder) -> None:
    recorder.started("a", {"seed": 1})
    recorder.reported("a", {"step": 1, "loss": 2.0}, finished=False, seconds=2.5)
    recorder.completed("a")
    assert (recorder.trials[0].status, recorder.trials[0].metric) == ("stopped", 2.0)


def test_a_trial_that_is_stopped_at_its_last_step_has_finished(recorder: Recorder) -> None:
    recorder.started("a", {"seed": 1})
    recorder.reported("a", {"step": 9, "loss": 2.0}, finished=False, seconds=2.5)
    recorder.completed("a")
    assert recorder.trials[0].status == "finished"


def test_a_wrong_trial_fails_at_once(recorder: Recorder, ended: list[Trial]) -> None:
    recorder.started("a", {"seed": 1})
    recorder.reported("a", {"step": 1, "loss": 2.0}, finished=False, seconds=2.5)
    recorder.failed("a", TrialFailed("loss is nan", details="..."))
    (trial,) = ended
    assert (trial.status, trial.metric, trial.reason) == ("failed", None, "loss is nan")


def test_a_killed_trial_is_tried_again_but_not_for_ever(
    recorder: Recorder, ended: list[Trial]
) -> None:
    killed = TrialFailed("killed", may_retry=True)
    recorder.started("a", {"seed": 1})
    recorder.failed("a", killed)
    assert not ended
    recorder.started("a", {"seed": 1})
    recorder.failed("a", killed)
    (trial,) = ended
    assert (trial.status, trial.tries, trial.reason) == ("failed", 2, "killed (2 times)")


def test_an_eviction_is_no_failure(recorder: Recorder, ended: list[Trial]) -> None:
    for _ in range(5):
        recorder.started("a", {"seed": 1})
        recorder.failed("a", TrialFailed("evicted", may_retry=True, evicted=True))
    assert not ended
    recorder.started("a", {"seed": 1})
    recorder.reported("a", {"step": 1, "loss": 1.0}, finished=True, seconds=2.5)
    recorder.completed("a")
    assert (ended[0].status, ended[0].tries, ended[0].reason) == ("finished", 1, None)


def test_a_curve_keeps_what_led_to_the_state_that_a_trial_goes_on_from(recorder: Recorder) -> None:
    killed = TrialFailed("killed", may_retry=True, evicted=True)

    def told(*steps: int) -> list[float]:
        for step in steps:
            recorder.reported("a", {"step": step, "loss": 1.0}, finished=False, seconds=1.0)
        return [report["step"] for report in recorder.trials[1].reports]

    recorder.started("b", {"seed": 2})
    recorder.started("a", {"seed": 1})
    assert told(1, 2) == [1, 2]
    recorder.failed("a", killed)
    recorder.started("a", {"seed": 1})
    assert told(1, 2, 3) == [1, 2, 3]  # from its beginning
    recorder.took_over("a", {"seed": 3}, "b", 5)
    recorder.started("a", {"seed": 3})
    recorder.goes_on("a", None)  # after a pause, before it has told anything
    assert told(6, 7) == [1, 2, 3, 6, 7]
    recorder.failed("a", killed)
    recorder.started("a", {"seed": 3})
    recorder.goes_on("a", None)
    assert told(6, 7, 8, 9) == [1, 2, 3, 6, 7, 8, 9]
    for _ in range(2):
        recorder.failed("a", killed)
        recorder.started("a", {"seed": 3})
        recorder.goes_on("a", 8)  # its own state
        assert told() == [1, 2, 3, 6, 7, 8]
    recorder.took_over("a", {"seed": 4}, "b", 6)
    assert told(7, 8) == [1, 2, 3, 6, 7, 8, 7, 8]


def test_news_are_written_and_what_is_told_again_is_not(clock: FakeClock) -> None:
    lines: list[dict[str, object]] = []

    class Diary:
        def write(self, event: str, **fields: object) -> None:
            lines.append({"event": event, "at_s": clock.time(), **fields})

    def sweep(past: Past) -> Trial:
        recorder = Recorder(
            CONFIG, 9, clock, past=past, journal=Diary(), usd_per_hour=lambda trial_id: Decimal(90)
        )
        recorder.started("a", {"seed": 1})
        clock.sleep(4)
        with past.telling("a") if past.has_answer("a") else contextlib.nullcontext():
            recorder.reported("a", {"step": 9, "loss": 2.0}, finished=True, seconds=3.5)
            recorder.completed("a")
        return recorder.trials[0]

    first = sweep(Past())
    assert [line["event"] for line in lines] == ["started", "reported", "ended"]
    second = sweep(Past(list(lines)))
    assert len(lines) == 3
    assert second == first and second.seconds == 4.0 and second.usd == Decimal("0.1")
