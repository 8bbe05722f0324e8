"""A worker's word about its engine."""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace

import prometheus_client
import pytest

from ebbtide.platform.errors import ServeError
from ebbtide.serve.beats import Pulse, engine_load, next_beat_s
from ebbtide.serve.fleet import BEAT_S, GIVEN_UP_S, IDLE_BEAT_S, Beat, EngineLoad


class Engine:
    """A client of an engine that answers, hangs or has died."""

    errored = False
    model_config = SimpleNamespace(max_model_len=64)

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.asked = 0

    async def is_sleeping(self) -> bool:
        self.asked += 1
        await self.answers.wait()
        return False


def test_an_engine_is_silent_from_its_last_answer_on() -> None:
    async def main() -> None:
        engine = Engine()
        pulse = Pulse(engine, ["router"], "decode", "http://here")
        engine.answers.set()
        probing = asyncio.create_task(pulse._probe())
        while not engine.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pulse._silent_s() == 0.0
        pulse.check()
        engine.answers.clear()
        while engine.asked < 2:
            await asyncio.sleep(0.01)
        assert 0.0 < pulse._silent_s() < GIVEN_UP_S
        pulse.check()
        pulse._asked_s = time.monotonic() - GIVEN_UP_S - 1
        assert GIVEN_UP_S < pulse._silent_s() < math.inf
        with pytest.raises(ServeError, match="has not answered for 2"):
            pulse.check()
        engine.errored = True
        assert pulse._silent_s() == math.inf
        with pytest.raises(ServeError):
            pulse.check()
        probing.cancel()

    asyncio.run(main())


def test_who_leaves_says_so_before_it_ends_what_it_has_begun() -> None:
    told: list[Beat] = []

    def remote(beat: Beat) -> asyncio.Future[None]:
        told.append(beat)
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heard.set_result(None)
        return heard

    async def main() -> None:
        engine = Engine()
        pulse = Pulse(engine, ["router"], "decode", "http://here")
        pulse._routers = [SimpleNamespace(beat=SimpleNamespace(remote=remote))]
        idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaving = asyncio.create_task(pulse.leave(idle, 60))
        while not told:
            await asyncio.sleep(0)
        assert told[0].is_leaving and not leaving.done()
        idle.set_result(None)
        await leaving

    asyncio.run(main())


def test_an_engines_load_is_what_vllm_counts() -> None:
    registry = prometheus_client.CollectorRegistry()
    assert engine_load(registry) == EngineLoad()
    for name, value in (("kv_cache_usage_perc", 0.25), ("num_requests_running", 3)):
        gauge = prometheus_client.Gauge(f"vllm:{name}", "", ["engine"], registry=registry)
        gauge.labels("0").set(value)
    times = prometheus_client.Histogram("vllm:request_queue_time_seconds", "", registry=registry)
    times.observe(0.5)
    times.observe(0.25)
    assert engine_load(registry) == EngineLoad(3, 0, 0.25, 0.75, 2)


@pytest.mark.parametrize(
    ("before", "now", "silent_s", "expected"),
    [
        (EngineLoad(), EngineLoad(), 0.0, IDLE_BEAT_S),
        (EngineLoad(), EngineLoad(), 1.5, BEAT_S),
        (EngineLoad(), EngineLoad(num_ended=1), 0.0, BEAT_S),
        (EngineLoad(1), EngineLoad(1), 0.0, BEAT_S),
        (EngineLoad(0, 1), EngineLoad(0, 1), 0.0, BEAT_S),
        (EngineLoad(kv_usage=0.1), EngineLoad(kv_usage=0.1), 0.0, BEAT_S),
    ],
)
def test_a_worker_that_rests_says_so_less_often(
    before: EngineLoad, now: EngineLoad, silent_s: float, expected: float
) -> None:
    assert next_beat_s(before, now, silent_s) == expected
