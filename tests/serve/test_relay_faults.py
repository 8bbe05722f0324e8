"""Requests and clients that would harm an endpoint, and what becomes of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from ebbtide.serve.fleet import Beat
from ebbtide.serve.split import Settings
from ebbtide.serve.worker_client import Leg
from tests.serve.small_endpoint import SmallEndpoint, small_endpoint
from tests.serve.stand_in import StandIn, says
from tests.serve.test_relay import asked


class Breaking(StandIn):
    """Breaks off, once it has accepted a request, without a word."""

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        raise ConnectionResetError


class Silent(StandIn):
    """Says nothing."""

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        await asyncio.sleep(600)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [Breaking, lambda: StandIn(refuse=(500, "dead"))])
def test_a_request_that_ends_engines_does_not_end_them_all(stream: bool, kind: Any) -> None:
    async def main() -> None:
        workers = [kind() for _ in range(6)]
        async with small_endpoint(workers) as endpoint:
            answer = await endpoint.ask(prompt="go>", stream=stream)
            assert answer.status == 503
            assert sum(len(worker.asked) for worker in workers) == 3

    asyncio.run(main())


def test_a_slow_stream_that_cannot_move_is_seen_through() -> None:
    async def main() -> None:
        workers = [StandIn(gap_s=0.6), StandIn(gap_s=0.6)]
        async with small_endpoint(workers, settings=Settings("auto", 64, 0.2)) as endpoint:
            path, body = asked("completion", max_tokens=5, logprobs=2)
            answer = await endpoint.ask(path, **body)
            assert answer.text == says(5) and answer.is_done

    asyncio.run(main())


def test_a_worker_whose_client_does_not_listen_is_not_silent() -> None:
    async def main() -> None:
        async with small_endpoint([StandIn(), StandIn()]) as endpoint:
            watch, worker = endpoint.watch, endpoint.fleet.workers()[0]
            now_s = time.monotonic()
            leg = Leg(worker, has_begun=True)
            worker.output_s = now_s - 60
            assert watch.hangs(leg, now_s)
            leg.is_sending = True
            assert not watch.hangs(leg, now_s)
            dead = Beat("dead", "decode", "http://127.0.0.1:1", 4096, engine_silent_s=float("inf"))
            worker.last = dead
            assert watch.hangs(leg, now_s)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_that_is_begun_again_has_its_first_chunk(kind: str) -> None:
    async def main() -> None:
        path, body = asked(kind, max_tokens=3, return_token_ids=True)
        answers = []
        for workers in ([StandIn()], [Breaking(), StandIn()]):
            async with small_endpoint(workers) as endpoint:
                answers.append(await endpoint.ask(path, **body))
        assert answers[0].events == answers[1].events

    asyncio.run(main())


async def _until_idle(endpoint: SmallEndpoint) -> None:
    while endpoint.num_running():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_the_answer_has_used_its_prompt(stream: bool) -> None:
    async def main() -> None:
        worker = Silent()
        async with small_endpoint([worker]) as endpoint:
            work = asyncio.create_task(endpoint.ask(prompt="go>" * 40, stream=stream))
            while not worker.num_open:
                await asyncio.sleep(0.01)
            work.cancel()
            await _until_idle(endpoint)
            _, text = await endpoint.get("/metrics")
            (line,) = [
                each
                for each in text.splitlines()
                if each.startswith("ebbtide_tokens_total{") and 'prompt"' in each
            ]
            assert float(line.split()[-1]) > 0

    asyncio.run(asyncio.wait_for(main(), 60))


class LateEnd(StandIn):
    """Ends its body a while after the last event."""

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        async def later(message: dict[str, Any]) -> None:
            if b"[DONE]" not in message.get("body", b""):
                await send(message)
                return
            await send({**message, "more_body": True})
            await asyncio.sleep(0.2)
            await send({"type": "http.response.body", "body": b""})

        await super()._generate(path, request, later)


def test_a_client_that_has_everything_has_not_left() -> None:
    async def main() -> None:
        async with small_endpoint([LateEnd()]) as endpoint:
            path, body = asked("completion", max_tokens=4)
            assert (await endpoint.ask(path, **body)).is_done
            await _until_idle(endpoint)
            _, text = await endpoint.get("/metrics")
            assert 'status="200"' in text and 'status="499"' not in text

    asyncio.run(asyncio.wait_for(main(), 60))


class WithoutPages(StandIn):
    """Has no description of what it serves."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/openapi.json":
            raise ConnectionResetError
        await super().__call__(scope, receive, send)


def test_any_worker_may_describe_what_is_served() -> None:
    async def main() -> None:
        for workers in ([WithoutPages(), StandIn()], [StandIn(), WithoutPages()]):
            async with small_endpoint(workers) as endpoint:
                assert (await endpoint.get("/openapi.json"))[0] == 200
        async with small_endpoint([WithoutPages()]) as endpoint:
            assert (await endpoint.get("/openapi.json"))[0] == 503

    asyncio.run(main())
