"""Streaming clients for the serving benchmarks: what they see, in milliseconds and tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_NUMBERS = itertools.count()


@dataclass
class Seen:
    """By all clients of one measurement."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0

    def summary(self) -> dict[str, float]:
        """Percentiles in ms, and tokens per second."""
        return {
            "ttft_p50_ms": _ms(self.ttft_s, 50),
            "ttft_p90_ms": _ms(self.ttft_s, 90),
            "itl_p50_ms": _ms(self.gaps_s, 50),
            "itl_p90_ms": _ms(self.gaps_s, 90),
            "itl_p99_ms": _ms(self.gaps_s, 99),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "failed": self.failed,
        }


def _ms(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return round(values[0] * 1e3, 2) if values else float("nan")
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1e3, 2)


async def one(
    session: aiohttp.ClientSession, url: str, model: str, prompt_tokens: int, max_tokens: int
) -> tuple[float, list[float]]:
    """One streamed completion of a prompt that was never seen: time to first token, and gaps."""
    text = f"{next(_NUMBERS):08d} " + "the quick brown fox " * (prompt_tokens // 20 + 1)
    body: dict[str, Any] = {
        "model": model,
        "prompt": text[:prompt_tokens],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began_s = last_s = time.perf_counter()
    arrivals: list[float] = []
    is_done = False
    async with session.post(f"{url}/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif line.startswith(b"data: ") and json.loads(line[6:]).get("choices"):
                now_s = time.perf_counter()
                arrivals.append(now_s - last_s)
                last_s = now_s
    if not is_done or not arrivals:
        raise RuntimeError(f"a stream ended after {last_s - began_s:.2f} s without [DONE]")
    return arrivals[0], arrivals[1:]


async def load(
    url: str, model: str, clients: int, requests: int, prompt_tokens: int, max_tokens: int
) -> Seen:
    """``clients`` at once, each with so many requests one after the other."""
    seen = Seen()
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:

        async def client() -> None:
            for _ in range(requests):
                try:
                    ttft_s, gaps_s = await one(session, url, model, prompt_tokens, max_tokens)
                except (aiohttp.ClientError, RuntimeError, TimeoutError):
                    seen.failed += 1
                    continue
                seen.ttft_s.append(ttft_s)
                seen.gaps_s += gaps_s
                seen.tokens += max_tokens

        began_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seen.seconds = time.perf_counter() - began_s
    return seen


def measure(url: str, model: str, rounds: dict[int, int], prompt_tokens: int = 90) -> Any:
    """By number of clients: what they see; ``rounds`` is requests per client. One goes before."""

    async def all_of_them() -> dict[int, dict[str, float]]:
        await load(url, model, 2, 3, prompt_tokens, 16)
        found = {}
        for clients, each in rounds.items():
            found[clients] = (await load(url, model, clients, each, prompt_tokens, 64)).summary()
            print(f"{clients} clients: {found[clients]}", file=sys.stderr, flush=True)
        return found

    return asyncio.run(all_of_them())
