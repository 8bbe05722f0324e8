"""The event log: what is written is read back in order, whatever the storage does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.platform.errors import StorageError
from ebbtide.platform.storage import LocalStorage
from ebbtide.train.events import (
    Event,
    EventLog,
    Finished,
    GenerationBegan,
    Started,
    Step,
    read_events,
)


def step(number: int, attempt: int = 0, loss: float = 1.0, time_s: float | None = None) -> Step:
    return Step(
        time_s=float(number) if time_s is None else time_s,
        attempt=attempt,
        step=number,
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        tokens=128,
        epoch=0,
        samples="ab",
        seconds={"compute": 0.5},
    )


def test_events_are_read_in_order_across_drivers(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    first: list[Event] = [
        Started(time_s=0, steps=9),
        GenerationBegan(time_s=1, attempt=0, world_size=2, nodes=("a", "b")),
        step(1),
    ]
    second: list[Event] = [Started(time_s=5, steps=9), step(2, attempt=1)]
    with EventLog(run, session=0) as log:
        log.write(first)
    with EventLog(run, session=1) as log:
        log.write(second)
    assert read_events(run) == [*first, *second]


def test_a_run_without_events_has_none(tmp_path: Path) -> None:
    assert read_events(str(tmp_path / "nothing")) == []


def test_segments_are_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    written = [step(number) for number in range(1, 3001)]
    with EventLog(run, session=0, interval_s=3600) as log:
        for start in range(0, 3000, 500):
            log.write(written[start : start + 500])
            assert log.flush()
    assert read_events(run) == written
    assert len(run.list("events/")) > 1


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    with EventLog(run, session=0) as log:
        log.write([step(1)])
    run.put("events/0001-000000.jsonl", b'{"kind": "step", "att\n')
    assert read_events(run) == [step(1)]


def test_events_of_a_newer_version_keep_their_known_fields(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    run.put(
        "events/0000-000000.jsonl",
        b'{"kind": "finished", "time_s": 1, "status": "finished", "step": 3, "new": 1}\n',
    )
    assert read_events(run) == [Finished(time_s=1, status="finished", step=3)]


class Failing(LocalStorage):
    """Refuses the first puts."""

    def __init__(self, root: Path, failures: list[int]) -> None:
        super().__init__(root)
        self.failures = failures

    def child(self, prefix: str) -> Failing:
        return Failing(self._root / prefix, self.failures)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if self.failures[0]:
            self.failures[0] -= 1
            raise StorageError("down")
        super().put(key, data, if_absent=if_absent)


@pytest.mark.parametrize("more", [[], [step(2)]])
def test_what_storage_refused_is_written_at_the_next_flush(
    tmp_path: Path, more: list[Event]
) -> None:
    run = Failing(tmp_path, [1])
    log = EventLog(run, session=0, interval_s=3600)
    log.write([step(1)])
    assert not log.flush()
    log.write(more)
    assert log.flush()
    log.close()
    assert read_events(run) == [step(1), *more]
