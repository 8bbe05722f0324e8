"""The journal on storage: what a killed driver leaves, and what the next one reads."""

from __future__ import annotations

from pathlib import Path

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.storage import LocalStorage
from ebbtide.tune import journal
from ebbtide.tune.journal import Journal


def test_what_one_driver_writes_the_next_one_reads(tmp_path: Path) -> None:
    storage, clock = LocalStorage(tmp_path), FakeClock(100.0)
    assert journal.read(storage).attempts == 0
    for attempt in (1, 2):
        writer = Journal(storage, attempt, clock)
        clock.sleep(5)
        writer.write("started", trial=attempt, values={"seed": 3})
        writer.write("reported", trial=attempt, metrics={"loss": float("nan")}, seconds=2.0)
        writer.close()
        clock.sleep(1000)
    found = journal.read(storage)
    assert (found.attempts, found.seconds) == (2, 10.0)
    kinds = [event["event"] for event in found.events]
    assert kinds == ["attempt", "started", "reported"] * 2
    assert found.events[1] == {"event": "started", "at_s": 105.0, "trial": 1, "values": {"seed": 3}}
