"""A worker is left when it hangs, at the moment that this is clear, and not when it is slow."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest

from ebbtide.serve import engine_processes
from ebbtide.serve.fleet import Beat, Worker
from ebbtide.serve.split import Settings
from ebbtide.serve.watch import ANSWER_S, ASK_AFTER_S, Sign, Watch, fault
from ebbtide.serve.worker_client import Leg, Lost
from tests.serve.small_endpoint import SmallEndpoint, small_endpoint
from tests.serve.stand_in import StandIn, says
from tests.serve.test_relay import asked

TOKENS = 30
NEVER_S = 60.0
LONG_S = 0.4 + ASK_AFTER_S + ANSWER_S


def leg(**facts: Any) -> Leg:
    worker = Worker(Beat("w", "decode", "http://w", 100), 0.0, output_s=10.0)
    return Leg(worker, has_begun=True, asked_s=10.0, **facts)


@pytest.mark.parametrize(
    ("sign", "silent_s", "expected"),
    [
        (None, 1.4, None),
        (None, 1.5, "no token"),
        (Sign(answered_s=10.4, is_stopped=True), 0.4, "stopped"),
        (Sign(answered_s=9.9, is_stopped=True), 0.4, None),  # and has given a token since
        (Sign(asked_s=9.9), 1.3, None),
        (Sign(asked_s=10.4), 1.1, None),
        (Sign(asked_s=10.4), 1.3, "no sign of life"),
        (Sign(answered_s=11.0), 1.4, None),
        (Sign(answered_s=11.0), 1.6, "no token"),  # one that spins is alive, and hangs
    ],
)
def test_what_a_worker_is_left_for(sign: Sign | None, silent_s: float, expected: str) -> None:
    found = fault(leg(), sign, 10.0 + silent_s, 1.5)
    assert found is None if expected is None else expected in str(found)


def test_a_stream_moves_once_for_silence_and_always_from_what_is_stopped() -> None:
    moved = leg(has_moved=True)
    assert fault(moved, Sign(asked_s=10.4), 99.0, 1.5) is None
    assert fault(moved, Sign(answered_s=10.4, is_stopped=True), 10.5, 1.5)


@dataclass
class Slow(StandIn):
    """Computes each prompt for a while."""

    prompt_s: float = LONG_S

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        await asyncio.sleep(self.prompt_s)
        await super()._generate(path, request, send)


async def hung(endpoint: SmallEndpoint) -> int:
    _, text = await endpoint.get("/metrics")
    return int(float(text.split("\nebbtide_hung_requests_total ")[1].split()[0]))


@pytest.mark.parametrize("alive", [None, {"is_stopped": True}])
def test_a_stream_leaves_a_worker_that_gives_no_sign_or_is_stopped(alive: Any) -> None:
    async def main() -> None:
        first = StandIn(break_after=9, how="hang", alive=alive)
        settings = Settings("auto", 64, NEVER_S)
        async with small_endpoint([first, StandIn()], settings=settings) as endpoint:
            path, body = asked("completion", max_tokens=TOKENS)
            answer = await endpoint.ask(path, **body)
            assert answer.text == says(TOKENS) and answer.is_done
            assert first.asked and await hung(endpoint) == 1

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_without_a_token_leaves_a_worker_that_gives_no_sign(role: str) -> None:
    """Of silence it could not tell: a long prompt takes its time."""

    async def main() -> None:
        first = Slow(prompt_s=600, alive=None)
        decode, prefill = ([StandIn()], [first]) if role == "prefill" else ([first, StandIn()], [])
        settings = Settings("split" if prefill else "auto", 64, NEVER_S)
        async with small_endpoint(decode, prefill, settings=settings) as endpoint:
            path, body = asked("completion", max_tokens=TOKENS)
            answer = await endpoint.ask(path, **body)
            assert answer.text == says(TOKENS) and first.asked and await hung(endpoint) == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_slow_worker_that_lives_is_not_left() -> None:
    async def main() -> None:
        first, settings = Slow(), Settings("auto", 64, NEVER_S)
        async with small_endpoint([first, StandIn()], settings=settings) as endpoint:
            path, body = asked("completion", max_tokens=TOKENS)
            assert (await endpoint.ask(path, **body)).text == says(TOKENS)
            assert len(first.asked) == 1 and first.num_signs
            assert await hung(endpoint) == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_router_that_has_no_turn_itself_blames_nobody() -> None:
    """What its workers have said meanwhile waits in its sockets."""

    async def main() -> None:
        workers = [StandIn(gap_s=0.02), StandIn(gap_s=0.02)]
        async with small_endpoint(workers, settings=Settings("auto", 64, 0.3)) as endpoint:
            path, body = asked("completion", max_tokens=TOKENS)
            asking = asyncio.create_task(endpoint.ask(path, **body))
            while not any(each.asked for each in workers):
                await asyncio.sleep(0.01)
            for _ in range(3):
                await asyncio.sleep(0.05)
                time.sleep(0.5)
            assert (await asking).text == says(TOKENS)
            assert await hung(endpoint) == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_router_that_is_always_late_leaves_a_worker_that_hangs() -> None:
    async def main() -> None:
        first = StandIn(break_after=9, how="hang")
        async with small_endpoint(
            [first, StandIn()], settings=Settings("auto", 64, 0.3)
        ) as endpoint:
            path, body = asked("completion", max_tokens=TOKENS)
            asking = asyncio.create_task(endpoint.ask(path, **body))
            while not asking.done():
                time.sleep(0.12)
                await asyncio.sleep(0)
            assert (await asking).text == says(TOKENS)

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize(
    ("cause", "is_asked"), [(TimeoutError(), True), (OSError("refused"), False)]
)
def test_a_question_that_times_out_is_not_answered(cause: Exception, is_asked: bool) -> None:
    class Client:
        async def is_stopped(self, worker: Worker) -> bool:
            raise Lost("not there") from cause

    watch: Any = Watch(None, Client(), None, 1.5)  # type: ignore[arg-type]
    sign = Sign(asked_s=1.0, is_stopped=True)
    asyncio.run(watch._answer(leg().worker, sign))
    assert (sign.asked_s == 1.0) is is_asked and sign.is_stopped is is_asked


def test_a_stopped_process_is_told_from_a_living_one() -> None:
    code = "open('/proc/self/comm', 'w').write('VLLM::Test'); print(1, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert process.pid in engine_processes.of_replica(os.getpid())
        assert not engine_processes.is_stopped([process.pid])
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert engine_processes.is_stopped([process.pid])
    finally:
        process.kill()
        process.communicate()
    assert not engine_processes.is_stopped([process.pid])
