"""Lines are on storage whole and in order, whatever the storage does."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from ebbtide.platform import segments
from ebbtide.platform.errors import StorageError
from ebbtide.platform.segments import SegmentWriter
from ebbtide.platform.storage import LocalStorage

NEVER_S = 3600.0


class Source:
    """Lines to be written, and a writer that takes them."""

    def __init__(self, storage: LocalStorage, *, every_s: float = NEVER_S, last: str = "") -> None:
        self._new: list[bytes] = []
        self._last = last
        self.writer = SegmentWriter(
            storage,
            "w",
            name="lines",
            take=self._take,
            intervals_s=itertools.repeat(every_s),
            closing_line=self._closing_line if last else None,
        )

    def add(self, *lines: str) -> None:
        self._new += [f"{line}\n".encode() for line in lines]

    def _take(self) -> bytes:
        new, self._new = self._new, []
        return b"".join(new)

    def _closing_line(self) -> bytes:
        return f"{self._last}\n".encode()


class Faulty(LocalStorage):
    """Refuses to put while ``is_down``; counts the puts, and tells of each."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_down, self.puts, self.was_put = False, 0, threading.Event()

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if self.is_down:
            raise StorageError("down")
        super().put(key, data, if_absent=if_absent)
        self.puts += 1
        self.was_put.set()


@pytest.fixture
def storage(tmp_path: Path) -> Faulty:
    return Faulty(tmp_path)


def written(storage: LocalStorage) -> list[bytes]:
    return [storage.get(info.key) for info in storage.list()]


def test_a_flush_replaces_the_newest_segment(storage: Faulty) -> None:
    source = Source(storage)
    source.add("a")
    assert source.writer.flush()
    assert written(storage) == [b"a\n"]
    source.add("b", "c")
    source.writer.close()
    assert [info.key for info in storage.list()] == ["w-000000.jsonl"]
    assert written(storage) == [b"a\nb\nc\n"]


def test_nothing_new_is_not_written(storage: Faulty) -> None:
    source = Source(storage)
    assert source.writer.flush()
    source.add("a")
    assert source.writer.flush() and source.writer.flush()
    source.writer.close()
    assert storage.puts == 1


def test_a_closing_line_is_the_last_one_and_not_kept(storage: Faulty) -> None:
    source = Source(storage, last="alive")
    assert source.writer.flush()
    assert written(storage) == [b"alive\n"]
    source.add("a")
    source.writer.close()
    assert written(storage) == [b"a\nalive\n"]


def test_a_full_segment_is_left_and_another_begun(
    storage: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_SEGMENT_BYTES", 4)
    source = Source(storage)
    for line in ("a", "b", "c"):
        source.add(line)
        assert source.writer.flush()
    source.writer.close()
    assert written(storage) == [b"a\nb\n", b"c\n"]


@pytest.mark.parametrize("more", [[], ["b"]])
def test_what_was_refused_is_written_at_the_next_flush(storage: Faulty, more: list[str]) -> None:
    source = Source(storage)
    source.add("a")
    storage.is_down = True
    assert not source.writer.flush()
    storage.is_down = False
    source.add(*more)
    assert source.writer.flush()
    source.writer.close()
    assert written(storage) == ["".join(f"{line}\n" for line in ["a", *more]).encode()]


def test_a_closed_writer_says_what_is_lost_and_closes_once(
    storage: Faulty, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(storage)
    source.add("a")
    storage.is_down = True
    source.writer.close()
    source.writer.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert storage.uri in caplog.text


@pytest.mark.parametrize(("every_s", "asked"), [(0.001, False), (NEVER_S, True)])
def test_the_thread_flushes_in_time_or_when_it_is_asked(
    storage: Faulty, every_s: float, asked: bool
) -> None:
    source = Source(storage, every_s=every_s)
    source.add("a")
    if asked:
        source.writer.flush_soon()
    assert storage.was_put.wait(30)
    assert written(storage) == [b"a\n"]
    source.writer.close()
