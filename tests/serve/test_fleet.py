"""Which workers get requests, and how one of them is chosen."""

from __future__ import annotations

import math

from ebbtide.serve import prefixes
from ebbtide.serve.config import Role
from ebbtide.serve.fleet import (
    BEAT_S,
    GIVEN_UP_S,
    IDLE_BEAT_S,
    SILENT_S,
    STUCK_S,
    Beat,
    Fleet,
)


def beat(name: str, role: Role = "decode", **fields: object) -> Beat:
    return Beat(name, role, f"http://{name}", 100, **fields)  # type: ignore[arg-type]


def test_a_worker_is_ready_while_it_and_its_engine_live() -> None:
    fleet = Fleet()
    fleet.beat(beat("a"), 0.0)
    (worker,) = fleet.workers()
    assert worker.is_ready(SILENT_S - 0.1) and not worker.is_ready(SILENT_S)
    assert not worker.is_gone(SILENT_S) and worker.is_gone(GIVEN_UP_S)
    fleet.beat(beat("a", next_s=IDLE_BEAT_S), 0.0)
    assert worker.is_ready(SILENT_S) and not worker.is_ready(SILENT_S + IDLE_BEAT_S - BEAT_S)
    fleet.beat(beat("a", engine_silent_s=STUCK_S), 5.0)
    assert not worker.is_ready(5.0) and worker.is_stuck and not worker.is_gone(5.0)
    fleet.beat(beat("a", engine_silent_s=GIVEN_UP_S), 5.0)
    assert worker.is_gone(5.0)
    fleet.beat(beat("a", engine_silent_s=math.inf), 5.0)
    assert worker.is_gone(5.0)
    fleet.beat(beat("a", is_leaving=True), 5.0)
    assert not worker.is_ready(5.0) and not worker.is_gone(5.0)
    fleet.beat(beat("a"), 6.0)
    worker.shunned_until_s = 7.0
    assert not worker.is_ready(6.9) and worker.is_ready(7.0)


def test_a_worker_that_comes_back_elsewhere_begins_anew() -> None:
    fleet = Fleet()
    fleet.beat(beat("a"), 0.0)
    fleet.workers()[0].shunned_until_s = 100.0
    fleet.beat(Beat("a", "decode", "http://elsewhere", 100), 1.0)
    assert [w.last.url for w in fleet.ready("decode", 1.0)] == ["http://elsewhere"]


def test_silent_workers_are_forgotten() -> None:
    fleet = Fleet()
    fleet.beat(beat("a"), 0.0)
    fleet.beat(beat("b"), 50.0)
    fleet.forget_silent(70.0)
    assert [w.last.worker_id for w in fleet.workers()] == ["b"]


def test_the_decode_workers_come_first_and_prefill_workers_can_do_their_work() -> None:
    fleet = Fleet()
    for name, role in (("p", "prefill"), ("d", "decode")):
        fleet.beat(beat(name, role), 0.0)  # type: ignore[arg-type]

    def chosen(*tried: str) -> str | None:
        worker = fleet.for_decode([], 0.0, {f"http://{name}" for name in tried})
        return worker.last.worker_id if worker else None

    assert (chosen(), chosen("d"), chosen("d", "p")) == ("d", "p", None)
    prefill = fleet.for_prefill([], 0.0)
    assert prefill is not None and prefill.last.worker_id == "p"
    decode = next(each for each in fleet.workers() if each.last.role == "decode")
    decode.shunned_until_s = 1.0
    assert (chosen(), chosen("p")) == ("p", "d")  # rather than nobody
    fleet.beat(beat("d", is_leaving=True), 0.0)
    assert chosen("p") is None


def test_a_known_prefix_is_worth_some_waiting() -> None:
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.beat(beat(name), 0.0)
    a, b = fleet.workers()
    keys = prefixes.keys("x" * 640)
    b.prefixes.add(keys)
    assert fleet.for_decode(keys, 0.0, ()) is b
    b.num_requests = 2
    assert fleet.for_decode(keys, 0.0, ()) is b
    b.num_requests = 3
    assert fleet.for_decode(keys, 0.0, ()) is a
