"""Streams whose tokens and gaps are kept, and the processes that faults are done to."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

from ebbtide.platform.process_session import descendants

TOKENS = 160
REMOTE = 'ebbtide_prefills_total{where="remote"}'
HUNG = "ebbtide_hung_requests_total"
_LONG_TOKENS = 900
_BACK_S = 300.0
_POLL_S = 0.1


@dataclass
class Stream:
    """One answer: its ids, the gaps between them, and whether it ended as it should."""

    ids: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    is_done: bool = False
    error: str | None = None


async def stream(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, into: Stream
) -> None:
    """Ask for greedy tokens with their ids."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    last_s: float | None = None
    try:
        async with session.post(f"{url}/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    into.is_done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        into.error = event["error"]["message"]
                        continue
                    now_s = time.perf_counter()
                    for choice in event["choices"]:
                        into.ids += choice["token_ids"] or []
                    if last_s is not None:
                        into.gaps_s.append(now_s - last_s)
                    last_s = now_s
    except aiohttp.ClientError as error:
        into.error = repr(error)


async def round_of(
    url: str, model: str, prompts: Sequence[str], strike: Callable[[], None] | None = None
) -> list[Stream]:
    """Streams to their ends; ``strike`` is called once all have had a few tokens."""
    begun = random.randrange(5, TOKENS // 2)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as session:
        streams = [Stream() for _ in prompts]
        work = [
            asyncio.create_task(stream(session, url, model, prompt, into))
            for prompt, into in zip(prompts, streams, strict=True)
        ]
        if strike is not None:
            while min(len(each.ids) for each in streams) < begun:
                await asyncio.sleep(0.01)
            strike()
        await asyncio.gather(*work)
        return streams


async def under_long_prompts(url: str, model: str, prompts: Sequence[str]) -> list[Stream]:
    """Streams to their ends, while two clients have long prompts computed."""

    async def ask(session: aiohttp.ClientSession) -> None:
        while True:
            prompt = [random.randrange(1, 250) for _ in range(_LONG_TOKENS)]
            body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
            async with session.post(f"{url}/completions", json=body) as response:
                await response.read()

    async with aiohttp.ClientSession() as session:
        asking = [asyncio.create_task(ask(session)) for _ in range(2)]
        try:
            return await round_of(url, model, prompts)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


def victims(model: str, role: str, kind: str) -> list[psutil.Process]:
    """The processes of a kind (``replica`` or ``engine``) that a role has below this process."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if not command.startswith("ray::") or f"{role}:{model}" not in command:
                continue
            family = [psutil.Process(each) for each in descendants(pid)]
            if kind == "replica":
                found.append(process)
            else:
                found += [each for each in family if each.name().startswith("VLLM::EngineCore")]
        except psutil.NoSuchProcess:
            continue
    return found


def await_both(base: str, at_least_s: float) -> float:
    """Seconds until both roles are ready; no sooner than it is known that one was not."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < _BACK_S:
        try:
            with urllib.request.urlopen(f"{base}/ready", timeout=5) as answer:
                ready = json.loads(answer.read())
        except (urllib.error.HTTPError, OSError):
            ready = {}
        took_s = time.monotonic() - began_s
        if ready.get("prefill") and ready.get("decode") and took_s > at_least_s:
            return took_s
        time.sleep(_POLL_S)
    raise RuntimeError("a worker did not come back")


def worker_names(url: str, role: str) -> set[str]:
    """The workers of a role that the router has heard of lately."""
    with urllib.request.urlopen(url.replace("/v1", "/metrics"), timeout=10) as answer:
        text = answer.read().decode()
    return set(re.findall(rf'ebbtide_engine_requests{{role="{role}",worker="([^"]+)"', text))


def await_another(url: str, role: str, before: set[str]) -> float:
    """Seconds until a worker that was not there ``before`` is ready in a role."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < _BACK_S:
        if worker_names(url, role) - before:
            return time.monotonic() - began_s
        time.sleep(_POLL_S)
    raise RuntimeError("no worker came in place of another")


def until_split(url: str, model: str, number: int) -> float:
    """Seconds until an answer has gone through both roles: one whose prompt is computed at a
    prefill worker. ``number`` makes its prompt new."""
    began_s, before = time.monotonic(), measured(url, REMOTE)
    while time.monotonic() - began_s < _BACK_S:
        body = {"model": model, "prompt": f"{number} {time.monotonic()} the fox", "max_tokens": 4}
        asked = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                answer.read()
        except urllib.error.HTTPError:
            continue
        if measured(url, REMOTE) > before:
            return time.monotonic() - began_s
    raise RuntimeError("no answer goes through both roles")


def measured(url: str, name: str) -> float:
    """A counter of the router; 0 if it is not there."""
    with urllib.request.urlopen(url.replace("/v1", "/metrics"), timeout=10) as answer:
        text = answer.read().decode()
    _, _, rest = text.partition(f"\n{name} ")
    return float(rest.split()[0]) if rest else 0.0
