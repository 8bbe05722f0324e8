"""Requests find their way through workers that are real servers, and that fail in every way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ebbtide.serve.split import Settings
from tests.serve.small_endpoint import Answer, small_endpoint
from tests.serve.stand_in import StandIn, fails, says

LONG = "x" * 400 + ">"
TOKENS = 60


def asked(kind: str, prompt: str = "go>", **options: Any) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"max_tokens": TOKENS, "stream": True, **options}
    body["stream_options"] = {"include_usage": True}
    if kind == "chat":
        message = {"role": "user", "content": prompt.removesuffix(">")}
        return "/v1/chat/completions", body | {"messages": [message]}
    return "/v1/completions", body | {"prompt": prompt}


async def answered(decode: list[StandIn], prefill: list[StandIn], *args: Any, **kw: Any) -> Answer:
    async with small_endpoint(decode, prefill) as endpoint:
        path, body = asked(*args, **kw)
        return await endpoint.ask(path, **body)


def is_whole(answer: Answer, num_tokens: int = TOKENS, prompt: str = "go>") -> None:
    """The answer is that of one undisturbed worker."""
    assert answer.text == says(num_tokens)
    assert answer.is_done and not answer.is_broken
    assert answer.finish_reasons == ["length"]
    assert "\ufffd" not in answer.text
    assert answer.usage == {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_tokens,
        "total_tokens": len(prompt) + num_tokens,
    }
    assert len({event["id"] for event in answer.events}) == 1
    assert len({event["object"] for event in answer.events}) == 1


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_undisturbed_stream_is_passed_on(kind: str) -> None:
    answer = asyncio.run(answered([StandIn()], [StandIn()], kind))
    is_whole(answer)
    assert "from_another" not in str(answer.events)
    for event in answer.events:  # what was asked for the router's sake is not shown
        assert not event.get("prompt_token_ids")
        assert not any(c.get("token_ids") or c.get("prompt_token_ids") for c in event["choices"])


@pytest.mark.parametrize("kind", ["completion", "chat"])
@pytest.mark.parametrize("how", ["reset", "end", "abort", "error", "hang"])
def test_a_stream_goes_on_at_another_worker(kind: str, how: str) -> None:
    async def main() -> None:
        first = StandIn(how=how)
        settings = Settings("auto", 64, 0.5 if how == "hang" else 30)  # else busy is no fault
        async with small_endpoint([first, StandIn()], settings=settings) as endpoint:
            for break_after in (0, 1, 2, 8, 9, 10, 12, 33):  # within characters of several tokens
                if how == "hang" and break_after not in (1, 9):
                    continue  # each takes its time
                first.break_after = break_after
                endpoint.forgive()
                path, body = asked(kind)
                before = len(first.asked)
                answers = await asyncio.gather(*(endpoint.ask(path, **body) for _ in range(2)))
                assert len(first.asked) > before, "not the worker that fails"
                for answer in answers:
                    is_whole(answer)

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_of_several_tokens_a_chunk_goes_on_at_another_worker(kind: str) -> None:
    """As with speculation: characters end and begin within chunks."""

    async def main() -> None:
        for sizes in ((3,), (5, 1, 2)):
            first, second = StandIn(per_chunk=sizes), StandIn(per_chunk=sizes[::-1])
            async with small_endpoint([first, second]) as endpoint:
                for break_after in (None, 1, 4, 9, 11, 17, 34):
                    first.break_after = break_after
                    endpoint.forgive()
                    path, body = asked(kind)
                    is_whole(await endpoint.ask(path, **body))
                    path, body = asked(kind, stop="mehr.")
                    stopped = await endpoint.ask(path, **body)
                    assert stopped.text == says(TOKENS)[: says(TOKENS).index("mehr.")]
            assert len(second.asked) >= 6, "it has not moved"

    asyncio.run(main())


def test_a_stream_moves_more_than_once() -> None:
    workers = [StandIn(break_after=7), StandIn(break_after=7), StandIn(break_after=7), StandIn()]
    is_whole(asyncio.run(answered(workers, [], "completion")))


def test_a_prefill_worker_is_the_spare_of_the_last_decode_worker() -> None:
    answer = asyncio.run(answered([StandIn(break_after=9)], [StandIn()], "completion"))
    is_whole(answer)


@pytest.mark.parametrize("how", ["reset", "end", "error"])
def test_without_a_spare_a_stream_ends_in_an_error_event(how: str) -> None:
    answer = asyncio.run(answered([StandIn(break_after=9, how=how)], [], "completion"))
    assert says(10).startswith(answer.text) and answer.text
    assert answer.events[-1]["error"]["code"] == "worker_lost"
    assert not answer.is_done and not answer.finish_reasons


@pytest.mark.parametrize(
    "field", [{"n": 2}, {"presence_penalty": 0.5}, {"logprobs": 2}, {"unheard_of": 1}]
)
def test_what_cannot_be_continued_exactly_is_not(field: dict[str, Any]) -> None:
    workers = [StandIn(break_after=9), StandIn(break_after=9)]
    answer = asyncio.run(answered(workers, [], "completion", **field))
    assert answer.events[-1]["error"]["code"] == "worker_lost"
    again = [StandIn(break_after=0), StandIn()]  # but begun again, if nothing has been sent
    assert asyncio.run(answered(again, [], "completion", **field)).text == says(TOKENS)


def test_stop_strings_are_found_across_workers() -> None:
    async def main() -> None:
        worker = StandIn()
        async with small_endpoint([worker, StandIn()]) as endpoint:
            for stop in ("und", "🫠 u", ["nothing", "mehr."]):
                first = stop if isinstance(stop, str) else "mehr."
                expected = says(TOKENS)[: says(TOKENS).index(first)]
                for break_after in (None, *range(3, 32)):
                    worker.break_after = break_after
                    endpoint.forgive()
                    path, body = asked("completion", stop=stop)
                    answer = await endpoint.ask(path, **body)
                    assert answer.text == expected, (stop, break_after)
                    assert answer.is_done and answer.finish_reasons == ["stop"]
                    choices = [event["choices"][0] for event in answer.events if event["choices"]]
                    assert choices[-1]["stop_reason"] == first

    asyncio.run(main())


def test_a_stream_whose_client_wants_token_ids_has_each_once() -> None:
    async def main() -> None:
        for break_after in (9, 10):
            workers = [StandIn(break_after=break_after), StandIn()]
            answer = await answered(workers, [], "completion", return_token_ids=True)
            choices = [event["choices"][0] for event in answer.events if event["choices"]]
            ids = [token for choice in choices for token in choice["token_ids"]]
            assert bytes(ids).decode(errors="ignore") == says(TOKENS) and len(ids) == TOKENS
            assert [c["prompt_token_ids"] for c in choices if c.get("prompt_token_ids")] == [
                list(b"go>")
            ]

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_long_prompts_are_computed_elsewhere(kind: str) -> None:
    async def main() -> None:
        decode, prefill = StandIn(), StandIn()
        async with small_endpoint([decode], [prefill]) as endpoint:
            for stream in (True, False):
                path, body = asked(kind, f"{stream} {LONG}", stream=stream, min_tokens=3)
                answer = await endpoint.ask(path, **body)
                assert answer.status == 200
                text = answer.text if stream else str(answer.body["choices"][0])
                assert says(20) in text
        assert all(each["max_tokens"] == 1 and "stop" not in each for each in prefill.asked)
        assert all("min_tokens" not in each for each in prefill.asked)
        assert [each["kv_transfer_params"] for each in decode.asked] == [
            {"remote_engine_id": prefill.url}
        ] * len(decode.asked)
        assert len(prefill.asked) == 2

    asyncio.run(main())


def test_short_prompts_and_those_that_cannot_be_split_stay() -> None:
    async def main() -> None:
        decode, prefill = StandIn(), StandIn()
        async with small_endpoint([decode], [prefill]) as endpoint:
            await endpoint.ask(prompt="go>", stream=True)
            await endpoint.ask(prompt=LONG, n=2, stream=True)
        assert len(decode.asked) == 2 and not prefill.asked

    asyncio.run(main())


@pytest.mark.parametrize("status", [500, 503])
def test_the_decode_worker_computes_the_prompt_when_prefill_fails(status: int) -> None:
    async def main() -> None:
        prefill = StandIn(refuse=(status, "CUDA error at /usr/lib/x.py"))
        async with small_endpoint([StandIn()], [prefill]) as endpoint:
            path, body = asked("completion", LONG)
            is_whole(await endpoint.ask(path, **body), prompt=LONG)
            assert prefill.asked

    asyncio.run(main())


def test_a_dead_prefill_worker_costs_nothing() -> None:
    async def main() -> None:
        prefill = StandIn()
        async with small_endpoint([StandIn()], [prefill]) as endpoint:
            await prefill.stop()
            path, body = asked("completion", LONG)
            is_whole(await endpoint.ask(path, **body), prompt=LONG)
            await prefill.start()  # for its end

    asyncio.run(main())


def test_requests_that_are_not_streamed_are_asked_again() -> None:
    async def main() -> None:
        workers = [StandIn(refuse=(500, "dead")), StandIn()]
        async with small_endpoint(workers) as endpoint:
            for _ in range(2):
                answer = await endpoint.ask(prompt="go>", max_tokens=20)
                assert answer.status == 200 and answer.body["choices"][0]["text"] == says(20)
        async with small_endpoint([StandIn(refuse=(500, "dead"))]) as endpoint:
            answer = await endpoint.ask(prompt="go>", max_tokens=20)
            assert answer.status == 503 and "dead" not in str(answer.body)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_the_request_is_told_and_shuns_no_worker(stream: bool) -> None:
    async def main() -> None:
        worker = StandIn(refuse=(400, "max_tokens must be at least 1"))
        async with small_endpoint([worker]) as endpoint:
            answer = await endpoint.ask(prompt="go>", max_tokens=-1, stream=stream)
            assert answer.status == 400
            error = answer.body["error"]
            assert error["message"] == "max_tokens must be at least 1"
            assert error["type"] == "invalid_request_error"
            worker.refuse = None
            assert (await endpoint.ask(prompt="go>", stream=stream)).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_keys_and_values_for_a_request_that_is_refused_are_given_up(stream: bool) -> None:
    async def main() -> None:
        decode, prefill = StandIn(refuse=(400, "stop cannot be empty")), StandIn()
        async with small_endpoint([decode], [prefill]) as endpoint:
            answer = await endpoint.ask(prompt=LONG, stop=[""], stream=stream)
            assert answer.status == 400
            assert decode.released == [{"remote_engine_id": prefill.url}]
            await endpoint.ask(prompt="go>", stop=[""], stream=stream)
            assert len(decode.released) == 1

    asyncio.run(main())


def test_a_client_that_leaves_ends_its_request() -> None:
    async def main() -> None:
        decode, prefill = StandIn(gap_s=0.01), StandIn(gap_s=0.01)
        async with small_endpoint([decode], [prefill]) as endpoint:
            path, body = asked("completion", LONG, max_tokens=4000)
            work = [asyncio.create_task(endpoint.ask(path, **body)) for _ in range(20)]
            while decode.num_open < 20:
                await asyncio.sleep(0.01)
            for task in work:
                task.cancel()
            while decode.num_open or prefill.num_open:
                await asyncio.sleep(0.01)
            assert all(worker.num_requests == 0 for worker in endpoint.fleet.workers())

    asyncio.run(asyncio.wait_for(main(), 60))


class Gone(StandIn):
    """Has computed its first prompt, and nothing more."""

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        if len(self.asked) > 1:
            return await fails(send)
        await super()._generate(path, request, send)


class Misses(StandIn):
    """Cannot have what a prefill worker has computed."""

    async def _generate(self, path: str, request: dict[str, Any], send: Any) -> None:
        if (request.get("kv_transfer_params") or {}).get("remote_engine_id"):
            return await fails(send)
        await super()._generate(path, request, send)


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_dying_prefill_worker_had_is_computed_by_the_only_other_one(stream: bool) -> None:
    async def main() -> None:
        decode = Misses()
        settings = Settings("split", 64, 0.5)
        async with small_endpoint([decode], [Gone()], settings=settings) as endpoint:
            answer = await endpoint.ask(prompt="go>", stream=stream, max_tokens=TOKENS)
        assert answer.status == 200 and len(decode.asked) == 2
        assert not stream or answer.text == says(TOKENS)

    asyncio.run(main())


def test_split_and_colocated_are_taken_at_their_word() -> None:
    async def main() -> None:
        for mode, expected in (("split", 1), ("colocated", 0)):
            prefill = StandIn()
            settings = Settings(mode, 64, 0.5)  # type: ignore[arg-type]
            async with small_endpoint([StandIn()], [prefill], settings=settings) as endpoint:
                await endpoint.ask(prompt="go>")
            assert len(prefill.asked) == expected

    asyncio.run(main())


def test_slow_workers_lose_no_stream() -> None:
    """A worker that is slower than the limit is left once, for one that is no faster."""

    async def main() -> None:
        workers = [StandIn(gap_s=0.4), StandIn(gap_s=0.4)]
        async with small_endpoint(workers, settings=Settings("auto", 64, 0.2)) as endpoint:
            path, body = asked("completion", max_tokens=8)
            is_whole(await endpoint.ask(path, **body), 8)
            assert [len(worker.asked) for worker in workers] == [1, 1]

    asyncio.run(main())


def test_requests_wait_for_workers_to_be_known() -> None:
    async def main() -> None:
        async with small_endpoint([StandIn()], beating=False) as endpoint:
            asks = [
                asyncio.create_task(endpoint.ask(prompt="go>", stream=stream, max_tokens=9))
                for stream in (True, False)
            ]
            while endpoint.num_running() < 2:
                await asyncio.sleep(0.01)
            assert not any(ask.done() for ask in asks)
            endpoint.beating = {"w0"}
            streamed, whole = await asyncio.gather(*asks)
            assert streamed.text == whole.body["choices"][0]["text"] == says(9)

    asyncio.run(main())


def test_but_not_for_ever() -> None:
    async def main() -> None:
        settings = Settings("auto", 64, 0.5, wait_s=0.5)
        async with small_endpoint([StandIn()], beating=False, settings=settings) as endpoint:
            answer = await endpoint.ask(prompt="go>", stream=True)
            assert answer.status == 503
            assert answer.body["error"]["type"] == "server_error"

    asyncio.run(main())
