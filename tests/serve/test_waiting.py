"""Requests wait while there is no worker, where workers come with requests; but not too many."""

from __future__ import annotations

import asyncio
import time

import pytest

from ebbtide.serve.fleet import Beat
from ebbtide.serve.split import Settings
from tests.serve.small_endpoint import SmallEndpoint, small_endpoint
from tests.serve.stand_in import StandIn, says
from tests.serve.test_relay import LONG, asked, is_whole

SCALES = Settings("auto", 64, 0.5, True, may_be_none=True, wait_s=60, max_waiting=2)


async def waiting(endpoint: SmallEndpoint, number: int) -> None:
    while endpoint.relay.num_waiting < number:
        await asyncio.sleep(0.01)


def test_as_many_as_may_wait_are_answered_when_a_worker_comes() -> None:
    async def main() -> None:
        async with small_endpoint([StandIn()], beating=False, settings=SCALES) as endpoint:
            path, body = asked("completion")
            first = [asyncio.create_task(endpoint.ask(path, **body)) for _ in range(2)]
            await waiting(endpoint, 2)
            assert endpoint.relay.known(time.monotonic()).num_waiting == 2
            refused = await endpoint.ask(path, **body)
            assert (await endpoint.get("/ready"))[0] == 200  # send requests, for workers to come
            assert refused.status == 503 and int(refused.headers["Retry-After"]) > 0
            endpoint.beating = {"w0"}
            for each in first:
                is_whole(await each)
            assert endpoint.relay.num_waiting == 0

    asyncio.run(main())


def test_a_client_that_leaves_waits_no_more() -> None:
    async def main() -> None:
        async with small_endpoint([StandIn()], beating=False, settings=SCALES) as endpoint:
            asking = asyncio.create_task(endpoint.ask(prompt="go>"))
            await waiting(endpoint, 1)
            asking.cancel()
            while endpoint.relay.num_waiting:
                await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_met_the_last_worker_as_it_left_waits_for_the_next(stream: bool) -> None:
    async def main() -> None:
        leaving, next_one = StandIn(refuse=(500, "it ends")), await StandIn().start()
        async with small_endpoint([leaving], settings=SCALES) as endpoint:
            asking = asyncio.create_task(endpoint.ask(prompt="go>", max_tokens=9, stream=stream))
            await waiting(endpoint, 1)
            endpoint.fleet.beat(Beat("next", "decode", next_one.url, 4096), time.monotonic())
            answer = await asking
            text = answer.text if stream else answer.body["choices"][0]["text"]
            assert answer.status == 200 and text == says(9)
        await next_one.stop()

    asyncio.run(main())


def test_what_the_number_of_workers_is_decided_by() -> None:
    async def main() -> None:
        decode, prefill = StandIn(gap_s=0.01), StandIn()
        async with small_endpoint([decode], [prefill], settings=SCALES) as endpoint:
            endpoint.relay.client.last_s = time.monotonic() - 50
            found = endpoint.relay.known(time.monotonic())
            assert found.idle_s >= 50 and found.gap_s == found.prefill_tokens_per_s == 0
            assert found.ready == {"prefill": 1, "decode": 1}
            asking = asyncio.create_task(
                endpoint.ask(prompt=LONG, max_tokens=30, stream=True)  # by both
            )
            while not decode.num_open:
                await asyncio.sleep(0.001)
            assert endpoint.relay.known(time.monotonic()).idle_s == 0
            await asking
            found = endpoint.relay.known(time.monotonic())
            assert found.prefill_tokens_per_s > 0 and found.num_queued_tokens == 0
            assert found.gap_s >= 0.01 and found.idle_s < 30
            assert endpoint.relay.known(time.monotonic()).gap_s == 0  # none since

    asyncio.run(main())
