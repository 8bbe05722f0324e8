"""Events that are stored with a checkpoint, for the driver after one that was killed."""

from __future__ import annotations

from pathlib import Path

from ebbtide.platform.storage import open_storage
from ebbtide.train.events import Checkpoint, Event, Finished, StateDigest, Validation
from ebbtide.train.history import History
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


TOLD: list[Event] = [
    *(step(number) for number in range(1, 5)),
    StateDigest(time_s=4.0, attempt=0, step=4, tensors={}),
    Validation(time_s=4.1, attempt=0, step=4, loss=1.0),
    step(5),
    step(6),
]


def test_what_the_log_ends_too_early_for_is_found(tmp_path: Path) -> None:
    saved = stored(tmp_path / "step-5", 5, TOLD)
    assert unwritten(saved, TOLD[:3]) == TOLD[3:7]
    assert unwritten(saved, TOLD[:5]) == TOLD[5:7]
    assert unwritten(saved, []) == TOLD[:7]
    assert unwritten(saved, [*TOLD[:4], Finished(time_s=9.0, status="failed", step=4)]) == TOLD[4:7]
    assert unwritten(saved, TOLD[:7]) == []


def test_a_log_with_the_commit_lacks_nothing(tmp_path: Path) -> None:
    saved = stored(tmp_path / "step-5", 5, TOLD)
    commit = Checkpoint(time_s=5.5, attempt=0, step=5, uri="s3://elsewhere/run/checkpoints/step-5")
    assert unwritten(saved, [commit]) == []
    assert unwritten(saved, [commit.model_copy(update={"uri": "x/step-55"})]) == TOLD[:7]
    assert unwritten(None, TOLD[:2]) == []
    assert unwritten(CheckpointInfo(9, str(tmp_path / "old"), "complete", 1, 0.0), TOLD) == []


def test_a_later_attempt_that_made_steps_again_is_found(tmp_path: Path) -> None:
    """However far the attempt before had come; what it made after the checkpoint is lost."""
    first: list[Event] = [step(number, attempt=0) for number in range(1, 11)]
    second: list[Event] = [step(number, attempt=1, time_s=20.0 + number) for number in range(4, 9)]
    saved = stored(tmp_path / "step-8", 8, second)
    assert unwritten(saved, [*first, *second[:2]]) == second[2:]
    assert unwritten(saved, first) == second
    history = History([*first, *unwritten(saved, first)])
    assert sorted(history.kept) == list(range(1, 9))
    assert [history.kept[number].attempt for number in (3, 4, 8)] == [0, 1, 1]


def test_only_the_last_minute_is_remembered() -> None:
    last = LastEvents()
    for number in range(200):
        last.add(step(number))
    assert len(last.until(1000).splitlines()) == KEPT_S + 1
    assert last.until(50) == b""
