"""A worker's word about its engine."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from ebbtide.platform.errors import ServeError
from ebbtide.serve.beats import Pulse
from ebbtide.serve.fleet import GIVEN_UP_S


class Engine:
    """A client of an engine that answers, hangs or has died."""

    errored = False

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
        pulse = Pulse(engine, "router", "decode", "http://here")
        engine.answers.set()
        probing = asyncio.create_task(pulse._probe())
        while not engine.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pulse._silent_s() == 0.0
        pulse.check()
        pulse._answered_s = time.monotonic() - GIVEN_UP_S - 2
        assert GIVEN_UP_S < pulse._silent_s() < math.inf
        with pytest.raises(ServeError, match="has not answered for 2"):
            pulse.check()
        engine.errored = True
        assert pulse._silent_s() == math.inf
        with pytest.raises(ServeError):
            pulse.check()
        probing.cancel()

    asyncio.run(main())
