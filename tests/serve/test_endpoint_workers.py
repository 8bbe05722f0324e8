"""The processes behind an endpoint: what they use, what they keep, and that they may die.

The last of the endpoint's tests: they end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import math
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest

from ebbtide.platform.ports import free_run
from tests.serve.conftest import MODEL_NAME, Endpoint
from tests.serve.served import complete, family, measured, ready, replicas, stream, until, workers
from tests.serve.tiny_model import MAX_MODEL_LEN, SYMBOLS

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

_PATIENCE_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def test_the_workers_are_not_to_be_reached_from_outside(endpoint: Endpoint) -> None:
    found = workers(endpoint)
    assert len(found) >= 2
    for process in found:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert ipaddress.ip_address(connection.laddr.ip).is_loopback, connection


def test_each_role_has_one_process_that_computes(endpoint: Endpoint) -> None:
    """vLLM would have two, which wait for each other by polling without a pause."""
    for role in ("prefill", "decode"):
        assert [each.name() for each in workers(endpoint, role)] == ["VLLM::EngineCore"]


def socket_folders(endpoint: Endpoint) -> set[Path]:
    """Where engines and replicas have the sockets between them, which vLLM gives such names."""
    found = set()
    for process in (*replicas(endpoint), *workers(endpoint)):
        with contextlib.suppress(psutil.NoSuchProcess):
            paths = [Path(each.laddr) for each in process.net_connections("unix") if each.laddr]
            found |= {path.parent for path in paths if len(path.name) == 36}
    return found


def test_each_replica_has_a_folder_for_its_sockets_and_its_engines_files(
    endpoint: Endpoint,
) -> None:
    found = socket_folders(endpoint)
    assert len(found) == 2
    assert all(folder.name.startswith("ebbtide-scratch-zmq-") for folder in found)
    assert all(list(folder.glob("vllm_dist_*")) for folder in found)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """What they have used so far, in seconds of one core."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:2])
    return total


def test_idle_workers_do_not_spin(endpoint: Endpoint) -> None:
    """A thread that waits by spinning uses a core; so does an engine whose blocks nobody fetches,
    for the half minute of their lease. Requests have been refused just before.
    """
    began_s, before_s = time.monotonic(), cpu_s(workers(endpoint))
    time.sleep(3.0)
    used = (cpu_s(workers(endpoint)) - before_s) / (time.monotonic() - began_s)
    print(f"idle engines use {used:.1%} of a core")
    assert used < 0.2


def is_at_rest(endpoint: Endpoint) -> bool:
    """Whether no engine holds a sequence, or a block that is not free."""
    found = measured(endpoint)
    held = ("ebbtide_engine_sequences{", "ebbtide_engine_kv_usage_ratio{")
    usage = [value for name, value in found.items() if name.startswith(held)]
    return len(usage) == 6 and not any(usage)


async def abort_storm(url: str, number: int) -> tuple[int, int]:
    """Requests whose clients leave at any moment of their life; how many got a token, or all.

    One in ten leaves after its third chunk, however long that takes.
    """
    draw, begun, ended = random.Random(0), 0, 0
    at_once = asyncio.Semaphore(24)

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal begun, ended
        most, patience_s = (3, 120.0) if number % 10 == 0 else (1000, draw.choice(_PATIENCE_S))
        text = "".join(draw.choice("the tide") for _ in range(180))
        body = {"model": MODEL_NAME, "prompt": text, "max_tokens": 70, "stream": True}
        with contextlib.suppress(TimeoutError):
            async with (
                at_once,
                asyncio.timeout(patience_s),
                session.post(f"{url}/completions", json=body) as response,
            ):
                async for line in response.content:
                    begun += line.startswith(b"data: {")
                    ended += line.startswith(b"data: [DONE]")
                    most -= line.startswith(b"data: ")
                    if not most:
                        break

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(ask(session, each) for each in range(number)))
    return begun, ended


def test_clients_that_leave_leave_nothing(endpoint: Endpoint, client: openai.OpenAI) -> None:
    begun, ended = asyncio.run(abort_storm(endpoint.url, 500))
    assert begun
    took_s = until(lambda: is_at_rest(endpoint), 200, "blocks are held for nobody")
    print(f"{begun} tokens, {ended} ends; all blocks free after {took_s:.1f} s")
    with ThreadPoolExecutor(16) as pool:
        longest = [[5 + number] * (MAX_MODEL_LEN - 8) for number in range(16)]
        answers = list(pool.map(lambda ids: complete(client, ids, max_tokens=8), longest))
    assert all(answer.usage.completion_tokens == 8 for answer in answers)


_OPTIONS: dict[str, Any] = {"max_tokens": 200, "stream_options": {"include_usage": True}}
_NUM_STREAMS = 18  # seconds of work for the engine, which is much faster than these clients
_TEXTS = ("the tide", "and the crew meets the", f"{SYMBOLS} ")


Followed = tuple[str, list[Any], float, Exception | None]


def follow(client: openai.OpenAI, text: str) -> Followed:
    """A stream to its end: text, usage, longest gap, and the error that it ended in."""
    chunks: list[Any] = []
    last_s, gap_s, error = time.monotonic(), 0.0, None
    try:
        for chunk in complete(client, text, stream=True, **_OPTIONS):
            gap_s = max(gap_s, time.monotonic() - last_s if chunks else 0.0)
            last_s = time.monotonic()
            chunks.append(chunk)
    except openai.APIError as raised:
        error = raised
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    return "".join(c.text for chunk in chunks for c in chunk.choices), usages, gap_s, error


def followed(client: openai.OpenAI, victim: psutil.Process) -> list[Followed]:
    """Streams whose worker is killed while it computes, whatever its clients have seen by then."""

    def rests() -> bool:
        before_s = cpu_s([victim])
        time.sleep(0.3)
        return cpu_s([victim]) - before_s < 0.1

    until(rests, 60, "the worker does not come to rest")
    before_s = cpu_s([victim])
    with ThreadPoolExecutor(_NUM_STREAMS) as pool:
        work = [pool.submit(follow, client, text) for text in islice(cycle(_TEXTS), _NUM_STREAMS)]
        until(lambda: cpu_s([victim]) - before_s > 0.05, 60, "the worker does not compute")
        victim.kill()
        return [each.result() for each in work]


def test_streams_outlive_their_worker(endpoint: Endpoint, client: openai.OpenAI) -> None:
    expected = [stream(client, text, **_OPTIONS) for text in _TEXTS]
    before = measured(endpoint)["ebbtide_moved_streams_total"]
    found = followed(client, workers(endpoint, "decode")[-1])  # the other role can go on
    for (text, usages, _, error), (whole, whole_usages) in zip(found, cycle(expected)):
        assert error is None
        assert text == whole
        assert usages[0].completion_tokens == whole_usages[0].completion_tokens == 200
        assert usages[0].prompt_tokens == whole_usages[0].prompt_tokens
    assert measured(endpoint)["ebbtide_moved_streams_total"] > before
    print(f"longest gap of a stream that moved: {max(gap_s for *_, gap_s, _ in found):.2f} s")
    assert complete(client, "the tide", max_tokens=4).usage.completion_tokens == 4


_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_ASKED: tuple[dict[str, Any], ...] = (
    {"prompt": "the tide turns"},
    {"prompt": "the tide", "logprobs": 3, "stop": [" the"], "include_stop_str_in_output": True},
    {"prompt": "the gull", "echo": True, "min_tokens": 4},
    {"prompt": [6, 7, 8, 9], "return_token_ids": True, "ignore_eos": True},
    {"prompt": f"{SYMBOLS} ", "temperature": 1, "seed": 7, "top_p": 0.9},
    {"messages": [{"role": "user", "content": "the lamp"}], "logprobs": True, "top_logprobs": 2},
    {
        "messages": [{"role": "user", "content": "a or b"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "found", "schema": _SCHEMA},
        },
    },
)
_OWN = {"id", "created", "cached_tokens"}


def alike(one: Any, other: Any) -> bool:
    """Whether two answers are the same, but for what is of their own time and for rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            alike(one[key], other[key]) for key in one if key not in _OWN
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    return bool(one == other)


def joined(events: list[Any]) -> dict[str, Any]:
    """A stream's events as one: how many tokens come at once is a matter of chance."""
    choices = [each["choices"][0] for each in events if each["choices"]]
    return {
        "keys": sorted({key for event in events for key in event}),
        "of choices": sorted({key for choice in choices for key in choice}),
        "text": "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usage": events[-1]["usage"],
    }


def answers(endpoint: Endpoint) -> list[Any]:
    """The JSON of each answer, and what the same is as a stream."""
    found: list[Any] = []
    for request in _ASKED:
        path = "chat/completions" if "messages" in request else "completions"
        for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            body = {"model": MODEL_NAME, "max_tokens": 24, "temperature": 0, **request, **more}
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
            asked = urllib.request.Request(f"{endpoint.url}/{path}", data, headers)
            with urllib.request.urlopen(asked, timeout=120) as answer:
                text = answer.read().decode()
            lines = [each.removeprefix("data: ") for each in text.split("\n\n")]
            events = [json.loads(each) for each in lines if each.startswith("{")]
            found.append(joined(events) if more else events[0])
    return found


def test_the_same_is_answered_without_prefill_workers(endpoint: Endpoint) -> None:
    until(lambda: bool(ready(endpoint)["prefill"] and ready(endpoint)["decode"]), 400, "not back")
    split = answers(endpoint)
    remote = measured(endpoint)['ebbtide_prefills_total{where="remote"}']
    (replica,) = replicas(endpoint, "prefill")
    replica.kill()
    for one, other in zip(split, answers(endpoint), strict=True):
        assert alike(one, other), (one, other)
    assert measured(endpoint)['ebbtide_prefills_total{where="remote"}'] - remote <= 1  # it died


def test_another_model_is_served_without_a_request_that_fails(
    endpoint: Endpoint, client: openai.OpenAI
) -> None:
    """Every answer, under streams all the time, is the old model's or the new one's, whole."""
    until(lambda: bool(ready(endpoint)["prefill"] and ready(endpoint)["decode"]), 400, "not back")
    old = {text: stream(client, text, max_tokens=60)[0] for text in _TEXTS}
    command = [sys.executable, "-m", "ebbtide", "serve", "update", endpoint.url, "--model"]
    damaged = f"{endpoint.other_uri}/nothing"
    refused = subprocess.run([*command, damaged], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 8 and "holds nothing" in refused.stderr
    updating = subprocess.Popen([*command, endpoint.other_uri], stdout=subprocess.PIPE, text=True)
    found: list[tuple[str, str]] = []
    for text in cycle(_TEXTS):
        found.append((text, stream(client, text, max_tokens=60)[0]))
        time.sleep(0.05)  # the new engines need the cores
        if updating.poll() is not None:
            break
    told, _ = updating.communicate()
    assert updating.returncode == 0 and endpoint.other_uri in told, endpoint.log.read_text()[-3000:]
    new = {text: stream(client, text, max_tokens=60)[0] for text in _TEXTS}
    assert not set(new.values()) & set(old.values())
    assert {answer for _, answer in found} == {*old.values(), *new.values()}
    for text, answer in found:
        assert answer in (old[text], new[text])
    assert ready(endpoint) == {"ready": True, "prefill": 1, "decode": 1}


def test_ctrl_c_leaves_nothing(endpoint: Endpoint) -> None:
    processes = family(endpoint.process.pid)
    folders = socket_folders(endpoint)
    assert len(processes) > 8 and folders
    before = endpoint.log.read_text()
    for _ in range(2):  # an impatient one
        endpoint.process.send_signal(signal.SIGINT)
    assert endpoint.process.wait(90) == 130, endpoint.log.read_text()[-3000:]
    said = endpoint.log.read_text()[len(before) :]
    assert not any(word in said for word in ("Traceback", "rror", "failed")), said
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert endpoint.process.stdout is not None and endpoint.process.stdout.read() == ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", urlsplit(endpoint.url).port))
    left = {Path("/dev/shm", name) for name in endpoint.segments() - endpoint.segments_before}
    assert not left and not any(folder.exists() for folder in folders)


def test_what_is_wrong_is_said_before_anything_starts(exported: Path, tmp_path: Path) -> None:
    job = tmp_path / "serve.yaml"
    job.write_text(f"name: tide\nmodel: {{uri: {tmp_path}/nothing}}\nhttp: {{port: 1}}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used, free = f"http.port={taken.getsockname()[1]}", f"http.port={free_run(1)}"
        for overrides, message in (
            ([f"model.uri={exported}", used], "cannot listen there"),
            ([free], "no such directory"),
            ([f"model.uri={exported}", free, "decode.replicas=999"], "needs 1000 CPUs"),
            ([f"model.uri={exported}", free, "engine.max_num_seq=2"], "did you mean max_num_seqs?"),
        ):
            command = [sys.executable, "-m", "ebbtide", "serve", str(job)]
            for override in overrides:
                command += ["--set", override]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode != 0
            assert message in done.stderr
            assert done.stdout == ""
