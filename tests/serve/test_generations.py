"""Requests are led to another model's workers, and no answer is of two models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ebbtide.serve.fleet import Beat, Fleet
from ebbtide.serve.split import Settings
from tests.serve.small_endpoint import small_endpoint
from tests.serve.stand_in import StandIn, says
from tests.serve.test_relay import LONG, asked, is_whole


def test_new_requests_go_where_the_router_leads_and_begun_ones_stay() -> None:
    async def main() -> None:
        old, new = StandIn(gap_s=0.005), StandIn(generation=2)
        async with small_endpoint([old, new]) as endpoint:
            path, body = asked("completion")
            begun = asyncio.create_task(endpoint.ask(path, **body))
            while not old.num_open:
                await asyncio.sleep(0.001)
            endpoint.fleet.open = frozenset({2})
            assert endpoint.relay.num_at_work(1) == 1
            is_whole(await endpoint.ask(path, **body))
            assert (len(old.asked), len(new.asked)) == (1, 1)
            is_whole(await begun)
            assert endpoint.relay.num_at_work(1) == 0

    asyncio.run(main())


@pytest.mark.parametrize("how", ["reset", "hang"])
@pytest.mark.parametrize("has_spare", [True, False])
def test_a_stream_never_goes_on_at_another_model(how: str, has_spare: bool) -> None:
    async def main() -> None:
        old, new = StandIn(0.02, 20, how), [StandIn(generation=2) for _ in range(2)]
        spare = [StandIn(gap_s=0.001)] if has_spare else []
        async with small_endpoint([old], new) as endpoint:
            path, body = asked("completion")
            begun = asyncio.create_task(endpoint.ask(path, **body))
            while not old.num_open:
                await asyncio.sleep(0.001)
            endpoint.fleet.open = frozenset({2})
            for each in spare:
                await each.start()
                endpoint.fleet.beat(Beat("spare", "decode", each.url, 4096), time.monotonic())
            if how == "hang" and not has_spare:
                await asyncio.sleep(1.0)  # twice what it may be silent for
                assert not begun.done()  # there is nowhere to go, and it may come back
                begun.cancel()
            elif has_spare:
                is_whole(await begun)
            else:
                answer = await begun
                assert answer.text == says(20) and not answer.is_done
                assert answer.events[-1]["error"]["code"] == "worker_lost"
            assert not any(each.asked for each in new)
            for each in spare:
                await each.stop()

    asyncio.run(main())


def test_a_request_that_nothing_was_said_of_goes_to_the_other_model() -> None:
    async def main() -> None:
        old, new = StandIn(break_after=0, gap_s=0.05), StandIn(generation=2)
        async with small_endpoint([old, new]) as endpoint:
            path, body = asked("completion")
            begun = asyncio.create_task(endpoint.ask(path, **body))
            while not old.num_open:
                await asyncio.sleep(0.001)
            endpoint.fleet.open = frozenset({2})
            is_whole(await begun)
            assert new.asked

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_prompts_are_computed_by_the_model_that_goes_on(stream: bool) -> None:
    async def main() -> None:
        decode = [StandIn(), StandIn(generation=2)]
        prefill = [StandIn(), StandIn(generation=2)]
        async with small_endpoint(decode, prefill, settings=Settings("split", 1, 5)) as endpoint:
            endpoint.fleet.open = frozenset({1, 2})
            loads = endpoint.fleet.workers()[:2]
            for busy, first, then in ((1, prefill[0], decode[0]), (0, prefill[1], decode[1])):
                loads[busy].num_requests, loads[1 - busy].num_requests = 9, 0
                answer = await endpoint.ask(prompt=LONG, max_tokens=3, stream=stream)
                assert answer.status == 200
                assert len(first.asked) == len(then.asked) == 1
                params = then.asked[0]["kv_transfer_params"]
                assert params["remote_engine_id"] == first.url
            # where its decode worker is lost before a word, the other model does all of it
            decode[1].refuse = (500, "dead")
            answer = await endpoint.ask(prompt=LONG, max_tokens=3, stream=stream)
            assert answer.status == 200
            assert (len(prefill[1].asked), len(decode[0].asked)) == (2, 2)
            assert not decode[0].asked[1].get("kv_transfer_params")

    asyncio.run(main())


@dataclass
class _Last(StandIn):
    """The workers of its generation end while it computes a prompt."""

    end: Callable[[], None] = lambda: None

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        self.end()
        await super()._generate(path, request, send)


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_whose_model_has_ended_is_computed_by_the_other_one(stream: bool) -> None:
    async def main() -> None:
        decode, prefill = [StandIn(), StandIn(generation=2)], _Last()
        async with small_endpoint(decode, [prefill], settings=Settings("split", 1, 5)) as endpoint:

            def end() -> None:
                endpoint.fleet.open = frozenset({2})
                endpoint.beating.difference_update(("w0", "w2"))
                for worker in endpoint.fleet.workers():
                    if worker.last.generation == 1:
                        worker.last = replace(worker.last, is_leaving=True)

            prefill.end = end
            answer = await endpoint.ask(prompt=LONG, max_tokens=3, stream=stream)
            assert answer.status == 200 and prefill.asked and not decode[0].asked
            (asked,) = decode[1].asked
            assert not asked.get("kv_transfer_params") and asked["prompt"] == LONG

    asyncio.run(main())


def test_what_is_not_open_is_not_counted() -> None:
    fleet = Fleet()
    for number in (1, 2):
        url, length = f"http://{number}", 100 * number
        fleet.beat(Beat(f"w{number}", "decode", url, length, generation=number), 0.0)
    assert [each.last.generation for each in fleet.ready("decode", 0.0)] == [1]
    assert [each.last.generation for each in fleet.ready("decode", 0.0, 2)] == [2]
    assert [each.last.max_model_len for each in fleet.of()] == [100]
    fleet.open = frozenset({3})
    assert not fleet.is_ready(0.0) and fleet.for_decode([], 0.0, ()) is None
    assert fleet.for_prefill([], 0.0) is None
