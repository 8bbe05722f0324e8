"""One driver a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def test_a_process_of_another_container_of_that_host_name_is_watched(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    with RunLock(run):
        content = json.loads(run.get(KEY))
    for machine in ("boot/1", ""):
        elsewhere = {**content, "pid": 2**22 + 1, "machine": machine}
        run.put(KEY, json.dumps(elsewhere).encode())
        beating = json.dumps({**elsewhere, "beat": 7}).encode()
        clock = Busy(lambda beating=beating: run.put(KEY, beating))  # type: ignore[misc]
        with pytest.raises(ClusterError, match="another driver"), RunLock(run, clock):
            pytest.fail("a living lock was taken")


def test_a_lock_whose_put_was_repeated_is_ours(tmp_path: Path) -> None:
    class Forgetful(LocalStorage):
        """A server whose answer does not arrive: the client repeats the put."""

        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent)
            if if_absent:
                super().put(key, data, if_absent=True)

    clock = FakeClock()
    with RunLock(Forgetful(tmp_path), clock):
        assert clock.now_s == 0.0


def test_a_lock_that_its_holder_removes_meanwhile_is_taken(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    run.put(KEY, foreign(1))
    with RunLock(run, Busy(lambda: run.delete(KEY))):
        assert json.loads(run.get(KEY))["host"] != "elsewhere"


@pytest.mark.parametrize(
    "content",
    [
        b"garbage",
        b"\xff",
        b"[]",
        b'{"other": 1}',
        b'{"host": "elsewhere", "pid": "x", "token": "t", "beat": 1}',
        b'{"host": "elsewhere", "pid": 0, "token": "t", "beat": 1}',
    ],
)
def test_a_lock_that_cannot_be_read_is_one_that_does_not_beat(
    tmp_path: Path, content: bytes
) -> None:
    run = LocalStorage(tmp_path)
    run.put(KEY, content)
    clock = FakeClock()
    with RunLock(run, clock, beat_s=3.0):
        assert json.loads(run.get(KEY))["host"]
    assert clock.now_s == 12.0
    assert run.list() == []


def dead_here(run: LocalStorage) -> bytes:
    """The lock of a process of this host that is no more."""
    with RunLock(run):
        content = json.loads(run.get(KEY))
    return json.dumps({**content, "pid": 2**22 + 1}).encode()


def test_of_many_who_see_one_dead_lock_one_takes_it(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    left = dead_here(run)
    for _ in range(10):
        run.put(KEY, left)
        together, settled = threading.Barrier(4), threading.Barrier(4)

        def drive(together: threading.Barrier, settled: threading.Barrier) -> bool:
            together.wait()
            try:
                with RunLock(run, beat_s=0.05) as lock:
                    settled.wait()
                    lock.check()
                    return True
            except ClusterError:
                settled.wait()
                return False

        with ThreadPoolExecutor(4) as pool:
            tried = [pool.submit(drive, together, settled) for _ in range(4)]
        assert sorted(each.result() for each in tried) == [False, False, False, True]
        assert run.list() == []


def test_one_who_claims_late_leaves_the_new_lock_alone(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    run.put(KEY, foreign(1))
    waits = iter(range(100))
    clock = Busy(lambda: run.put(KEY, foreign(2 + wait)) if (wait := next(waits)) > 4 else None)

    class Late(LocalStorage):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent)
            if "claim" in key:  # another was here between what was seen and this claim
                super().put(KEY, foreign(7))

    with pytest.raises(ClusterError, match="elsewhere"), RunLock(Late(tmp_path), clock):
        pytest.fail("the lock of a faster one was taken")
    assert [info.key for info in run.list()] == [KEY]


def test_a_claim_whose_owner_died_is_taken_over_too(tmp_path: Path) -> None:
    run = LocalStorage(tmp_path)
    run.put(KEY, foreign(1))

    class Killed(LocalStorage):
        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            if key == KEY and not if_absent:
                raise KeyboardInterrupt
            super().put(key, data, if_absent=if_absent)

        def delete(self, key: str) -> None:
            pass

    with pytest.raises(KeyboardInterrupt), RunLock(Killed(tmp_path), FakeClock()):
        pytest.fail("it was killed before")
    assert len(run.list()) == 2
    with RunLock(run, FakeClock()):
        assert json.loads(run.get(KEY))["host"] != "elsewhere"


def test_a_driver_whose_lock_was_taken_ends_and_leaves_it(tmp_path: Path) -> None:
    run, ran = LocalStorage(tmp_path), []
    with RunLock(run, beat_s=0.02) as lock:
        tick = lock.watched(lambda: ran.append(1))
        tick()
        run.put(KEY, foreign(1))
        lock._thread.join(5)
        with pytest.raises(ClusterError, match="taken over by another one .process 1 on elsewhere"):
            tick()
    assert ran == [1]
    assert run.get(KEY) == foreign(1)
