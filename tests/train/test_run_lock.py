"""One driver a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.errors import ClusterError
from ebbtide.platform.storage import LocalStorage, Storage
from ebbtide.train.run_lock import RunLock

KEY = "driver.lock"


def foreign(beat: int) -> bytes:
    """The lock of a driver on another host."""
    return json.dumps({"host": "elsewhere", "pid": 1, "token": "t", "beat": beat}).encode()


class Busy(FakeClock):
    """While someone waits on this clock, something happens."""

    def __init__(self, happens: Callable[[], None]) -> None:
        super().__init__()
        self.happens = happens

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.happens()


def test_the_lock_is_there_while_it_is_held_and_gone_after(tmp_path: Path) -> None:
    run: Storage = LocalStorage(tmp_path)
    with RunLock(run):
        assert json.loads(run.get(KEY))["pid"]
    assert run.list() == []


def test_a_second_driver_is_refused_and_the_first_keeps_its_lock(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    with RunLock(run, beat_s=0.05):
        held = json.loads(run.get(KEY))["token"]
        with pytest.raises(ClusterError, match="another driver"), RunLock(run, beat_s=0.2):
            pytest.fail("two drivers hold one run")
        assert json.loads(run.get(KEY))["token"] == held


def test_a_lock_that_changes_is_alive(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    run.put(KEY, foreign(1))
    clock = Busy(lambda: run.put(KEY, foreign(2)))
    with pytest.raises(ClusterError, match="elsewhere"), RunLock(run, clock):
        pytest.fail("a living lock was taken")
    assert run.get(KEY) == foreign(2)


def test_a_lock_that_does_not_change_is_taken_over(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    run.put(KEY, foreign(1))
    clock = FakeClock()
    with RunLock(run, clock, beat_s=3.0):
        assert json.loads(run.get(KEY))["host"] != "elsewhere"
    assert clock.now_s == 12.0


def test_a_dead_process_of_this_host_is_not_waited_for(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    with RunLock(run):
        content = json.loads(run.get(KEY))
    run.put(KEY, json.dumps({**content, "pid": 2**22 + 1}).encode())
    clock = FakeClock()
    with RunLock(run, clock):
        pass
    assert clock.now_s == 0.0


def test_a_lock_that_its_holder_removes_meanwhile_is_taken(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    run.put(KEY, foreign(1))
    with RunLock(run, Busy(lambda: run.delete(KEY))):
        assert json.loads(run.get(KEY))["host"] != "elsewhere"
