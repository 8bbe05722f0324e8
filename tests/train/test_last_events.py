"""Events that are stored with a checkpoint, for the driver after one that was killed."""

from __future__ import annotations

from pathlib import Path

from ebbtide.platform.storage import open_storage
from ebbtide.train.events import Event, Finished, StateDigest, Validation
from ebbtide.train.last_events import KEPT_S, LastEvents, unwritten
from ebbtide.train.manifest import EVENTS, CheckpointInfo
from tests.train.test_events import step


def stored(folder: Path, step_number: int, events: list[Event]) -> CheckpointInfo:
    """A checkpoint with what rank 0 had told."""
    last = LastEvents()
    for event in events:
        last.add(event)
    open_storage(str(folder)).put(EVENTS, last.until(step_number))
    return CheckpointInfo(step_number, str(folder), "complete", 1, 0.0)


def test_what_the_log_ends_too_early_for_is_found(tmp_path: Path) -> None:
    told: list[Event] = [
        *(step(number) for number in range(1, 5)),
        StateDigest(time_s=4.0, attempt=0, step=4, tensors={}),
        Validation(time_s=4.1, attempt=0, step=4, loss=1.0),
        step(5),
        step(6),
    ]
    saved = stored(tmp_path, 5, told)
    assert unwritten(saved, told[:3]) == told[3:7]
    assert unwritten(saved, told[:5]) == told[5:7]
    assert unwritten(saved, []) == told[:7]
    assert unwritten(saved, [*told[:4], Finished(time_s=9.0, status="failed", step=4)]) == told[4:7]


def test_nothing_is_missed_where_the_log_has_the_checkpoints_step(tmp_path: Path) -> None:
    told: list[Event] = [step(number) for number in range(1, 8)]
    saved = stored(tmp_path, 5, told)
    assert unwritten(saved, told[:5]) == []
    assert unwritten(saved, told) == []
    assert unwritten(None, told[:2]) == []
    assert unwritten(CheckpointInfo(9, str(tmp_path / "old"), "complete", 1, 0.0), told) == []


def test_steps_of_an_earlier_attempt_that_were_made_again_stay_lost(tmp_path: Path) -> None:
    """A later attempt, of which the log has the start, made the checkpoint."""
    first: list[Event] = [step(number, attempt=0) for number in range(1, 7)]
    second: list[Event] = [step(number, attempt=1, time_s=20.0 + number) for number in range(4, 9)]
    saved = stored(tmp_path, 8, second)
    assert unwritten(saved, [*first, *second[:2]]) == second[2:]
    assert unwritten(saved, first) == second


def test_only_the_last_minute_is_remembered() -> None:
    last = LastEvents()
    for number in range(200):
        last.add(step(number))
    assert len(last.until(1000).splitlines()) == KEPT_S + 1
    assert last.until(50) == b""
