"""The endpoint's door: who is let in, what is refused, and what is told."""

from __future__ import annotations

import asyncio
import json

import pytest

from ebbtide.platform.records import Served
from ebbtide.serve.books import Books
from ebbtide.serve.fleet import SILENT_S
from ebbtide.serve.keys import ApiKey, Limits, hashed
from ebbtide.serve.router import Door
from tests.serve.small_endpoint import MODEL, small_endpoint
from tests.serve.stand_in import StandIn, says
from tests.serve.test_books import Memory

ALICE, BOB = "key-of-alice-0123456789", "key-of-bob-0123456789"
KEYS = (
    ApiKey(name="alice", sha256=hashed(ALICE)),
    ApiKey(name="bob", sha256=hashed(BOB), limits=Limits(requests_per_minute=2)),
)
PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", PATH, b"{", 400),
        ("POST", PATH, b"\xff\xfe", 400),
        ("POST", PATH, b"[]", 400),
        ("POST", PATH, b"", 400),
        ("POST", PATH, b'{"prompt": "go>", "stream": "yes"}', 400),
        ("POST", PATH, b'{"prompt": "go>", "model": {"a": 1}}', 404),
        ("POST", PATH, b'{"prompt": "go>", "model": "no"}', 404),
        ("POST", PATH, b"[" * 100_000, 400),
        ("GET", PATH, None, 405),
        ("POST", "/v1/models", b"{}", 405),
        ("GET", "/v1/models/no", None, 404),
        ("GET", "/nowhere", None, 404),
        ("POST", PATH, b"x" * 1001, 413),
    ],
)
def test_what_is_no_request_is_refused_in_the_envelope(
    method: str, path: str, body: bytes | None, status: int
) -> None:
    async def main() -> None:
        limit = 1000 if status == 413 else 2**20
        door = Door((MODEL,), max_body_bytes=limit)
        async with (
            small_endpoint([StandIn()], door=door) as endpoint,
            endpoint.session.request(method, endpoint.url + path, data=body) as response,
        ):
            assert response.status == status
            error = json.loads(await response.text())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error" and error["message"]

    asyncio.run(main())


def test_keys_and_limits() -> None:
    async def main() -> None:
        worker = StandIn()
        async with small_endpoint([worker], door=Door((MODEL,), KEYS)) as endpoint:

            async def status(key: str | None, **request: object) -> int:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                body = {"model": MODEL, "prompt": "go>", **request}
                url = endpoint.url + PATH
                async with endpoint.session.post(url, json=body, headers=headers) as response:
                    if response.status == 429:
                        assert int(response.headers["retry-after"]) >= 1
                        assert (await response.json())["error"]["type"] == "rate_limit_error"
                    if response.status == 401:
                        assert (await response.json())["error"]["type"] == "authentication_error"
                    return response.status

            assert await status(None) == 401 and await status("key-of-nobody") == 401
            assert not worker.asked
            assert [await status(ALICE) for _ in range(4)] == [200] * 4
            assert [await status(BOB) for _ in range(3)] == [200, 200, 429]
            assert (await endpoint.get("/v1/models"))[0] == 401
            assert (await endpoint.get("/metrics"))[0] == 401
            assert (await endpoint.get("/health"))[0] == 200
            _, text = await endpoint.get("/metrics", Authorization=f"Bearer {ALICE}")
            assert 'ebbtide_tokens_total{key="alice",kind="output"} 64.0' in text
            assert ALICE not in text and BOB not in text

    asyncio.run(main())


def test_limits_without_keys_are_for_all_clients_together() -> None:
    async def main() -> None:
        door = Door((MODEL,), limits=Limits(concurrent_requests=2))
        async with small_endpoint([StandIn(gap_s=0.02)], door=door) as endpoint:
            asks = (endpoint.ask(prompt="go>", max_tokens=20) for _ in range(3))
            answers = await asyncio.gather(*asks)
            assert sorted(each.status for each in answers) == [200, 200, 429]
            assert (await endpoint.ask(prompt="go>")).status == 200
        async with small_endpoint(
            [StandIn()], door=Door((MODEL,), limits=Limits(tokens_per_minute=30))
        ) as endpoint:
            statuses = [(await endpoint.ask(prompt="go>", max_tokens=40)).status for _ in range(2)]
            assert statuses == [200, 429]

    asyncio.run(main())


def test_what_only_workers_may_say_is_taken_out() -> None:
    async def main() -> None:
        worker = StandIn()
        async with small_endpoint([worker]) as endpoint:
            meddling = {"do_remote_prefill": True, "remote_host": "evil"}
            answer = await endpoint.ask(
                prompt="go>", kv_transfer_params=meddling, request_id="mine", max_tokens=9
            )
            assert answer.body["choices"][0]["text"] == says(9)
        assert all(not {"kv_transfer_params", "request_id"} & set(each) for each in worker.asked)

    asyncio.run(main())


def test_ready_tells_the_truth() -> None:
    async def main() -> None:
        async with small_endpoint([StandIn()], [StandIn()]) as endpoint:

            async def ready() -> dict[str, object]:
                status, text = await endpoint.get("/ready")
                answer: dict[str, object] = json.loads(text)
                assert answer["ready"] is (status == 200)
                return answer

            assert await ready() == {"ready": True, "prefill": 1, "decode": 1}
            endpoint.beating = {"w1"}
            async with asyncio.timeout(10):
                while (await ready())["decode"]:
                    await asyncio.sleep(0.05)
            assert await ready() == {"ready": True, "prefill": 1, "decode": 0}  # it can do all
            endpoint.beating = set()
            for worker in endpoint.fleet.workers():
                worker.heard_s -= SILENT_S
            assert not (await ready())["ready"]
            assert (await endpoint.get("/health"))[0] == 200
            endpoint.beating = {"w0"}
            async with asyncio.timeout(10):
                while not (await ready())["ready"]:
                    await asyncio.sleep(0.05)
            assert (await endpoint.ask(prompt="go>")).status == 200

    asyncio.run(main())


def test_models_and_metrics() -> None:
    async def main() -> None:
        async with small_endpoint([StandIn(max_model_len=99)], [StandIn()]) as endpoint:
            cards = json.loads((await endpoint.get("/v1/models"))[1])
            assert [card["id"] for card in cards["data"]] == [MODEL]
            assert cards["data"][0]["max_model_len"] == 99
            assert json.loads((await endpoint.get(f"/v1/models/{MODEL}"))[1]) == cards["data"][0]
            described = json.loads((await endpoint.get("/openapi.json"))[1])
            assert list(described["paths"]) == ["/v1/completions"]
            await endpoint.ask(prompt="go>", max_tokens=8, stream=True)
            await endpoint.ask(prompt="go>", model="no")
            _, text = await endpoint.get("/metrics")
            for line in (
                'ebbtide_requests_total{key="anyone",path="/v1/completions",status="200"} 1.0',
                'ebbtide_requests_total{key="anyone",path="/v1/completions",status="404"} 1.0',
                'ebbtide_tokens_total{key="anyone",kind="prompt"} 3.0',
                'ebbtide_tokens_total{key="anyone",kind="output"} 8.0',
                'ebbtide_prefills_total{where="local"} 1.0',
                "ebbtide_time_to_first_token_seconds_count 1.0",
                "ebbtide_inter_token_seconds_count 7.0",
                'ebbtide_first_token_at_decode_seconds_count{prefill="local"} 1.0',
                "ebbtide_decode_seconds_count 1.0",
                'ebbtide_engine_kv_usage_ratio{role="decode",worker="w0"} 0.0',
                'ebbtide_ready_workers{role="decode"} 1.0',
                "ebbtide_running_requests 0.0",
            ):
                assert line in text, line

    asyncio.run(main())


def test_the_end_books_what_requests_at_work_have_had_and_nothing_twice() -> None:
    async def main() -> None:
        memory, books = Memory(), Books({"decode": None})
        books.open(memory)
        async with small_endpoint([StandIn(gap_s=0.01)], books=books) as endpoint:
            asking = asyncio.create_task(endpoint.ask(prompt="go>", max_tokens=50, stream=True))
            while not any(cost.num_output_tokens for _, cost in endpoint.router._at_work.values()):
                await asyncio.sleep(0.001)
            endpoint.router.close_books()
            assert (await asking).is_done
        (one,) = [each for each in memory.records if isinstance(each, Served)]
        assert (one.requests, one.prompt_tokens) == (1, 3) and 1 <= one.output_tokens < 50

    asyncio.run(main())


def test_what_is_refused_is_not_booked() -> None:
    async def main() -> None:
        memory, books = Memory(), Books({"decode": None})
        books.open(memory)
        async with small_endpoint([StandIn(refuse=(400, "no"))], books=books) as endpoint:
            assert (await endpoint.ask(prompt="go>")).status == 400
            assert (await endpoint.ask(prompt="go>", model="other")).status == 404
            endpoint.workers[0].refuse = None
            assert (await endpoint.ask(prompt="go>", max_tokens=2)).status == 200
            endpoint.router.close_books()
        (one,) = [each for each in memory.records if isinstance(each, Served)]
        assert (one.requests, one.output_tokens) == (1, 2)

    asyncio.run(main())
