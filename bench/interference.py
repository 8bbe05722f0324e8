"""Short streams under a storm of long prompts: separate workers against colocated ones.

``python -m bench.interference [--short] [--json]``: two workers on the same cores, first two that
do everything (with vLLM's own chunked prefill), then one prefill and one decode worker, led in mode
``split`` and, under ``auto_``, in mode ``auto``, which leaves short prompts whole. The last line is
one JSON document. Ratios of gaps are colocated over split (above 1: separation pays), that of times
to the first token is split over colocated (above 1: what it costs). Goodput: tokens per second of
streams whose first token came within 1 s and whose 99th percentile of gaps is at most 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from bench.serve_client import one
from bench.serve_model import MAX_MODEL_LEN, write_model
from ebbtide.platform.config import parse
from ebbtide.platform.ports import free_run
from ebbtide.serve import job
from ebbtide.serve.beats import NAMESPACE
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.router_actor import router_names

MODEL = "bench"
STREAMS, STREAM_TOKENS, STREAM_PROMPT = 4, 96, 60
STORM, STORM_PROMPT = 2, MAX_MODEL_LEN - 96
SLO_TTFT_S, SLO_GAP_S = 1.0, 0.05
_NUMBERS = itertools.count(1_000_000)


@dataclass
class Seen:
    """By the short streams, and how many long prompts were computed beside them."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    good_tokens: int = 0
    tokens: int = 0
    long_prompts: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        """In ms and tokens per second."""
        return {
            "ttft_p50_ms": round(statistics.median(self.ttft_s) * 1e3, 1),
            "ttft_p90_ms": round(_percentile(self.ttft_s, 90) * 1e3, 1),
            "itl_p50_ms": round(statistics.median(self.gaps_s) * 1e3, 2),
            "itl_p99_ms": round(_percentile(self.gaps_s, 99) * 1e3, 2),
            "itl_max_ms": round(max(self.gaps_s) * 1e3, 1),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "goodput_tokens_per_s": round(self.good_tokens / self.seconds, 1),
            "long_prompts_per_s": round(self.long_prompts / self.seconds, 2),
        }


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def storm(url: str, seconds: float) -> Seen:
    """Long prompts one after the other from some clients, and streams of short ones beside them."""
    seen, timeout = Seen(), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        began_s = time.perf_counter()
        over_s = began_s + seconds

        async def long_prompts() -> None:
            while time.perf_counter() < over_s:
                text = f"{next(_NUMBERS)} " + "a long way to go by sea " * (STORM_PROMPT // 24 + 1)
                body = {"model": MODEL, "prompt": text[:STORM_PROMPT], "max_tokens": 1}
                async with session.post(f"{url}/completions", json=body) as response:
                    response.raise_for_status()
                    await response.read()
                seen.long_prompts += 1

        async def streams() -> None:
            while time.perf_counter() < over_s:
                ttft_s, gaps_s = await one(session, url, MODEL, STREAM_PROMPT, STREAM_TOKENS)
                seen.ttft_s.append(ttft_s)
                seen.gaps_s += gaps_s
                seen.tokens += STREAM_TOKENS
                if ttft_s <= SLO_TTFT_S and _percentile(gaps_s, 99) <= SLO_GAP_S:
                    seen.good_tokens += STREAM_TOKENS

        work = [long_prompts() for _ in range(STORM)] + [streams() for _ in range(STREAMS)]
        await asyncio.gather(*work)
        seen.seconds = time.perf_counter() - began_s
    return seen


def colocated(model: Path, seconds: float) -> dict[str, float]:
    """Two workers that do everything."""
    with job.start(
        _config(model, "colocated", "decode: {replicas: 2, kv_cache_gb: 0.25}")
    ) as serving:
        return _measured(serving.endpoint, seconds)


def split(model: Path, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """One worker for prompts and one for streams: all prompts, and those for which it pays."""
    import ray

    config = _config(model, "auto", "prefill: {kv_cache_gb: 0.25}", "decode: {kv_cache_gb: 0.25}")
    with job.start(config) as serving:
        router = ray.get_actor(router_names(config)[0], NAMESPACE)
        ray.get(router.set_mode.remote("split"))
        every = _measured(serving.endpoint, seconds)
        ray.get(router.set_mode.remote("auto"))
        return every, _measured(serving.endpoint, seconds)


def _config(model: Path, mode: str, *roles: str) -> ServeConfig:
    text = f"""{{name: bench, http: {{port: {free_run(1)}}}, dtype: fp32, mode: {mode},
        {", ".join(roles)},
        model: {{uri: {model}, max_model_len: {MAX_MODEL_LEN}, name: {MODEL}}}}}"""
    return parse(text, ServeConfig)


def _measured(url: str, seconds: float) -> dict[str, float]:
    """Of a storm, after a short one; with what the router says of the stages of split prompts."""
    asyncio.run(storm(url, 2.0))
    before = _stages(url)
    figures = asyncio.run(storm(url, seconds)).summary()
    for name, (total_s, count) in _stages(url).items():
        if count > before[name][1]:
            mean_s = (total_s - before[name][0]) / (count - before[name][1])
            figures[f"{name}_mean_ms"] = round(mean_s * 1e3, 1)
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


def _stages(url: str) -> dict[str, tuple[float, float]]:
    """The sums and counts of seconds at prefill workers, and from there to the first token."""
    with urllib.request.urlopen(url.replace("/v1", "/metrics")) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
    values = {name: float(value) for name, _, value in lines if not name.startswith("#") and name}
    remote = '{prefill="remote"}'
    return {
        stage: (values.get(f"{name}_sum{labels}", 0.0), values.get(f"{name}_count{labels}", 0.0))
        for stage, name, labels in (
            ("prefill", "ebbtide_remote_prefill_seconds", ""),
            ("transfer", "ebbtide_first_token_at_decode_seconds", remote),
        )
    }


def compared(
    colocated: dict[str, float], split: dict[str, float], auto: dict[str, float]
) -> dict[str, float]:
    """The figures of all, and what separation gains and costs."""
    result: dict[str, float] = {}
    for name, figures in (("colocated", colocated), ("split", split), ("auto", auto)):
        result |= {f"{name}_{key}": value for key, value in figures.items()}
    for prefix, figures in (("", split), ("auto_", auto)):
        for key in ("itl_p99", "itl_max"):
            ratio = colocated[f"{key}_ms"] / figures[f"{key}_ms"]
            result[f"{prefix}{key}_ratio"] = round(ratio, 2)
        ratio = figures["ttft_p50_ms"] / colocated["ttft_p50_ms"]
        result[f"{prefix}ttft_ratio"] = round(ratio, 2)
    return result


def main() -> None:
    """Run both and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    seconds = 10.0 if arguments.short else 40.0
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        together = colocated(Path(folder), seconds)
        apart, auto = split(Path(folder), seconds)
    result = compared(together, apart, auto)
    if not arguments.json:
        for key, value in result.items():
            print(f"{key:40} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
