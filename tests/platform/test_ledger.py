from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.errors import CostError, StorageError
from ebbtide.platform.ledger import (
    Alive,
    Attempt,
    LedgerWriter,
    NodeUp,
    Record,
    Span,
    SpanRecorder,
    read_ledger,
)
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.meter import Meter, Owner
from ebbtide.platform.prices import Market
from ebbtide.platform.records import encode
from ebbtide.platform.storage import LocalStorage, open_storage

NODE_UP = NodeUp(
    node_id="n",
    time_s=1000.25,
    instance_type="g5.xlarge",
    market=Market.SPOT,
    zone="a",
    usd_per_hour=Decimal("0.450"),
    usd_per_hour_on_demand=None,
)
ATTEMPT = Attempt(index=0, start_s=1001, first_step=0)


def without_alive(records: tuple[Record, ...]) -> list[Record]:
    return [record for record in records if not isinstance(record, Alive)]


def eventually(condition: Callable[[], bool], limit_s: float = 20) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it has not happened"
        time.sleep(0.01)


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    with (
        LedgerWriter(LocalStorage(tmp_path)) as writer,
        LedgerWriter(LocalStorage(tmp_path)) as two,
    ):
        writer.write(NODE_UP)
        two.write(ATTEMPT)
    ledger = read_ledger(str(tmp_path))
    assert sorted(without_alive(ledger.records), key=lambda record: record.kind) == [
        ATTEMPT,
        NODE_UP,
    ]
    assert ledger.faults == ()


def test_the_same_on_s3(s3_server: LocalS3) -> None:
    uri = f"s3://{s3_server.bucket}/ledger-test/run"
    with LedgerWriter(open_storage(uri)) as writer:
        writer.write(NODE_UP)
        assert writer.flush()
        writer.write(ATTEMPT)
    assert without_alive(read_ledger(uri).records) == [NODE_UP, ATTEMPT]


def test_no_ledger_is_said(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="no ledger here"):
        read_ledger(str(tmp_path / "nothing"))


def test_spans_between_two_flushes_become_one_record(tmp_path: Path) -> None:
    clock = FakeClock(1000)
    with LedgerWriter(LocalStorage(tmp_path), clock) as writer:
        meter = Meter(clock, writer.recorder("n", 3))
        for step in range(5, 15):
            meter.step = step
            with meter.measure(Owner.COMPUTE):
                clock.sleep(0.75)
                with meter.measure(Owner.DATA_STALL):
                    clock.sleep(0.25)
        assert writer.flush()
        with meter.measure(Owner.VALIDATION):
            clock.sleep(2)
            assert writer.flush()  # a long measure is seen before it ends
            clock.sleep(3)
    records = without_alive(read_ledger(str(tmp_path)).records)
    assert records == [
        Span(
            node_id="n",
            attempt=3,
            start_s=1000,
            end_s=1010,
            seconds={Owner.COMPUTE: 7.5, Owner.DATA_STALL: 2.5},
            first_step=5,
            last_step=14,
        ),
        Span(
            node_id="n",
            attempt=3,
            start_s=1010,
            end_s=1012,
            seconds={Owner.VALIDATION: 2},
            first_step=14,
            last_step=14,
        ),
        Span(
            node_id="n",
            attempt=3,
            start_s=1012,
            end_s=1015,
            seconds={Owner.VALIDATION: 3},
            first_step=14,
            last_step=14,
        ),
    ]


def test_a_gap_or_a_jump_of_the_step_starts_a_new_record() -> None:
    written: list[Span] = []
    recorder = SpanRecorder("n", 0, written.append)
    for start_s, step in [(0, None), (1, 7), (2, 8), (2.5, None), (3, 8), (9, 9), (10, 4)]:
        length_s = 0.5 if start_s == 2 else 1
        recorder.span(start_s, start_s + length_s, {Owner.COMPUTE: length_s}, step)
    recorder.flush()
    recorder.flush()
    assert [(s.start_s, s.end_s, s.first_step, s.last_step) for s in written] == [
        (0, 3.5, 7, 8),
        (3, 4, 8, 8),
        (9, 10, 9, 9),
        (10, 11, 4, 4),
    ]


def test_a_restart_is_a_record_of_its_own() -> None:
    written: list[Span] = []
    recorder = SpanRecorder("n", 0, written.append)
    recorder.span(0, 5, {Owner.RESTART: 5}, None)
    recorder.span(5, 6, {Owner.RESTART: 1}, None)
    recorder.span(6, 7, {Owner.COMPUTE: 1}, 1)
    recorder.flush()
    assert [span.seconds for span in written] == [{Owner.RESTART: 6}, {Owner.COMPUTE: 1}]


class FaultyStorage(LocalStorage):
    """Refuses every put while ``broken``, and makes it wait for ``gate``."""

    broken = False
    gate = threading.Event()

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.gate.wait(60)
        if self.broken:
            raise StorageError("503")
        super().put(key, data, if_absent=if_absent)

    def child(self, prefix: str) -> FaultyStorage:
        return self  # so that the writer's storage is the test's


def test_a_storage_fault_loses_nothing_once_it_is_over(tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path / "ledger")
    storage.gate.set()
    with LedgerWriter(storage) as writer:
        storage.broken = True
        writer.write(NODE_UP)
        assert not writer.flush()
        writer.write(ATTEMPT)
        storage.broken = False
    assert without_alive(read_ledger(str(tmp_path)).records) == [NODE_UP, ATTEMPT]


def test_writing_does_not_wait_for_the_storage(tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path / "ledger")
    storage.gate = threading.Event()
    writer = LedgerWriter(storage, first_interval_s=0.01)
    flusher = threading.Thread(target=writer.flush)
    flusher.start()  # waits at the gate
    start_s = time.monotonic()
    for _ in range(1000):
        writer.write(ATTEMPT)
    assert time.monotonic() - start_s < 5
    storage.gate.set()
    flusher.join()
    writer.close()
    assert len(without_alive(read_ledger(str(tmp_path)).records)) == 1000


def test_segments_are_few_and_none_grows_without_bound(tmp_path: Path) -> None:
    with LedgerWriter(LocalStorage(tmp_path)) as writer:
        for _ in range(10):
            for _ in range(800):
                writer.write(NODE_UP)
            assert writer.flush()
    segments = LocalStorage(tmp_path / "ledger").list()
    assert 2 <= len(segments) <= 8000 * len(encode(NODE_UP)) / (256 * 1024) + 1
    assert all(info.size_bytes < 512 * 1024 for info in segments)
    assert len(without_alive(read_ledger(str(tmp_path)).records)) == 8000


KILLED = """
import sys, time
from pathlib import Path
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.meter import Meter, Owner
from ebbtide.platform.storage import LocalStorage

writer = LedgerWriter(LocalStorage(Path(sys.argv[1])), first_interval_s=0.05)
meter = Meter(SystemClock(), writer.recorder("n", 0))
meter.step = 1
with meter.measure(Owner.COMPUTE):
    time.sleep(600)
"""


def test_a_killed_process_leaves_what_it_had_flushed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    try:
        folder = tmp_path / "ledger"
        eventually(lambda: any(b'"span"' in path.read_bytes() for path in folder.glob("*.jsonl")))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    ledger = read_ledger(str(tmp_path))
    assert ledger.faults == ()
    assert all(set(r.seconds) == {Owner.COMPUTE} for r in ledger.records if isinstance(r, Span))


def test_a_damaged_line_is_reported_and_the_others_are_read(tmp_path: Path) -> None:
    lines = [
        encode(NODE_UP),
        b'{"kind":"alive","time_s":NaN}\n',
        b'{"kind":"toll","time_s":1}\n',
        b"\x00\x01\n",
        encode(ATTEMPT)[:-1].replace(b"}", b',"added_later":1}') + b"\n",
        encode(ATTEMPT)[:20],
    ]
    LocalStorage(tmp_path).put("ledger/w-000000.jsonl", b"".join(lines))
    ledger = read_ledger(str(tmp_path))
    assert ledger.records == (NODE_UP, ATTEMPT)
    assert [(fault.key, fault.line) for fault in ledger.faults] == [
        ("w-000000.jsonl", line) for line in (2, 3, 4, 6)
    ]
