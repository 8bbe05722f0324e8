"""An endpoint's ledger says what its workers' time cost, and who had the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.account import account
from ebbtide.platform.ledger import SpanRecorder
from ebbtide.platform.meter import Owner
from ebbtide.platform.records import Finished, Record, Served, Started, encode, parse_segment
from ebbtide.serve.books import FLUSH_S, Books, served
from ebbtide.serve.config import Role
from ebbtide.serve.fleet import BEAT_S, GIVEN_UP_S, Beat, EngineLoad, Fleet
from ebbtide.serve.stages import Cost, Stage

T = 1_800_000_000.0
PRICES: dict[Role, Decimal | None] = {"prefill": Decimal("3.60"), "decode": Decimal("7.20")}


@dataclass
class Memory:
    """A ledger's writer that keeps its records; ``flush`` as that of the real one does."""

    records: list[Record] = field(default_factory=list)
    recorders: list[SpanRecorder] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.records.append(record)

    def recorder(self, node_id: str, attempt: int) -> SpanRecorder:
        self.recorders.append(SpanRecorder(node_id, attempt, self.write))
        return self.recorders[-1]

    def flush(self) -> list[Record]:
        for recorder in self.recorders:
            recorder.flush()
        return self.records


def beat(name: str, role: Role = "decode", num_running: int = 0, num_ended: int = 0) -> Beat:
    load = EngineLoad(num_running=num_running, num_ended=num_ended)
    return Beat(name, role, f"http://{name}", 100, load=load)


def tokens(key: str, prompt: int, output: int, now_s: float = T) -> Served:
    return served(key, Cost(num_prompt_tokens=prompt, num_output_tokens=output), now_s)


def test_a_workers_time_is_compute_while_it_has_requests_and_idle_while_not() -> None:
    memory, books = Memory(), Books(PRICES)
    books.open(memory)
    running = [0] * 20 + [2] * 60 + [0] * 21  # half seconds
    for half, num in enumerate(running):
        books.beat(beat("a", num_running=num, num_ended=0 if half < 95 else 1), T + half / 2)
    books.close(T + 50)
    result = account(memory.flush(), T + 1000)
    owners = {owner: part.seconds for owner, part in result.by_owner.items() if part.seconds}
    assert owners == {Owner.COMPUTE: 30.5, Owner.IDLE: 19.5}, "a request between two beats counts"
    assert result.total.spent.usd == Decimal(50) / 3600 * Decimal("7.20")
    ((node, _),) = result.by(lambda row: row.node).items()
    assert (node.instance_type, node.usd_per_hour) == ("decode", Decimal("7.20"))


def test_a_worker_that_is_silent_ends_with_its_last_beat_and_may_come_again() -> None:
    memory, books = Memory(), Books(PRICES)
    books.open(memory)
    for half in range(21):
        books.beat(beat("a"), T + half / 2)
    books.tick(T + 10 + GIVEN_UP_S)
    for half in range(11):
        books.beat(beat("a"), T + 100 + half / 2)
    books.close(T + 200)
    assert account(memory.flush(), T + 1000).total.seconds == 15


def test_the_spare_continues_the_books_without_a_gap() -> None:
    first, second, memory, own = Books(PRICES), Books(PRICES), Memory(), Memory()
    first.open(memory)
    for half in range(41):
        for name in ("a", "b"):
            if name == "a" or half <= 20:
                first.beat(beat(name), T + half / 2)
                second.beat(beat(name), T + half / 2)
    second.tick(T + 10 + GIVEN_UP_S)  # the first is killed, with "b" still in its books
    second.open(own)
    for half in range(61, 81):
        second.beat(beat("a"), T + half / 2)
    second.close(T + 40)
    lives: list[Record] = [Started(time_s=T - 1), Finished(time_s=T + 50, status="stopped")]
    result = account([*lives, *memory.flush(), *own.flush()], T + 1000)
    assert result.total.seconds == 10 + 40


def test_what_a_key_had_is_added_up_between_two_flushes() -> None:
    memory, books = Memory(), Books(PRICES)
    books.open(memory)
    for number in range(10):
        books.ended(tokens("alice", 100, number, T + number))
    books.ended(tokens("bob", 1, 0))
    books.tick(T + FLUSH_S)
    books.tick(T + 2 * FLUSH_S)
    assert len(memory.records) == 2, "nothing new, nothing written"
    books.ended(tokens("alice", 1, 1))
    books.close(T + 60)
    written = b"".join(map(encode, memory.flush()))
    result = account(parse_segment("x", written).records, T + 60)
    assert [(k, s.requests, s.tokens) for k, s in result.served.items()] == [
        ("alice", 11, 1047),
        ("bob", 1, 1),
    ]
    assert result.served_tokens == 1048


def test_the_stages_of_a_request() -> None:
    cost = Cost(num_prompt_tokens=5, num_output_tokens=7)
    times: Mapping[Any, tuple[float, float]] = {
        "queue": (0, 1),
        "prefill": (1, 3),
        "transfer": (3, 3.5),
        "decode": (3.5, 10),
    }
    cost.stages = [Stage(name, "w", *span) for name, span in times.items()]
    cost.stages.append(Stage("decode", "v", 20, 21))  # it has moved
    one = served("k", cost, T)
    assert (one.queue_s, one.prefill_s, one.transfer_s, one.decode_s) == (1, 2, 0.5, 7.5)


worker = st.tuples(
    st.sampled_from(["prefill", "decode"]),
    st.integers(0, 300),  # its first half second
    st.integers(1, 400),  # how many it lives
    st.integers(0, 1),  # whether it has work
)
request = st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 4096), st.integers(0, 512))


@settings(max_examples=60, deadline=None)
@given(
    workers=st.lists(worker, min_size=1, max_size=5),
    requests=st.lists(request, min_size=1, max_size=30),
    cents=st.tuples(st.integers(1, 9999), st.integers(1, 9999)),
    takes_over=st.integers(0, 700),
)
def test_cost_per_million_tokens_is_replica_seconds_times_price_over_tokens(
    workers: list[tuple[Role, int, int, int]],
    requests: list[tuple[str, int, int]],
    cents: tuple[int, int],
    takes_over: int,
) -> None:
    prices: dict[Role, Decimal | None] = {
        "prefill": Decimal(cents[0]) / 100,
        "decode": Decimal(cents[1]) / 100,
    }
    memories, routers, fleet = (Memory(), Memory()), (Books(prices), Books(prices)), Fleet()
    routers[0].open(memories[0])
    active, last = 0, max(start + lives for _, start, lives, _ in workers)
    for half in range(last + 1):
        now_s = T + half * BEAT_S
        if half == takes_over:
            active = 1  # the other is dead
            routers[1].open(memories[1])
        for number, (role, start, lives, work) in enumerate(workers):
            if start <= half <= start + lives:
                told = beat(f"w{number}", role, work)
                fleet.beat(told, half * BEAT_S)
                for router in routers[active:]:
                    router.beat(told, now_s)
        if half % 10 == 0:
            for router in routers[active:]:
                router.tick(now_s)
        if half < len(requests):
            routers[active].ended(tokens(*requests[half], now_s))
    end_s = T + last * BEAT_S
    for one in requests[last + 1 :]:
        routers[active].ended(tokens(*one, end_s))
    routers[active].close(end_s)
    lives_of: list[Record] = [Started(time_s=T), Finished(time_s=end_s + 1, status="stopped")]
    served_before = [r for m in memories for r in m.flush()]
    result = account([*lives_of, *served_before], end_s + 100)
    expected = sum(
        Decimal(fleet.replica_s[role]) / 3600 * (prices[role] or 0) for role in fleet.replica_s
    )
    assert float(result.total.spent.usd or 0) == pytest.approx(float(expected), rel=1e-6)
    num_tokens = sum(prompt + output for _, prompt, output in requests)
    if takes_over > last:  # else what had not been flushed is lost
        assert result.served_tokens == num_tokens
        if num_tokens:
            per_million = float(result.total.spent.usd or 0) * 1e6 / result.served_tokens
            assert per_million == pytest.approx(float(expected) * 1e6 / num_tokens, rel=0.01)
