"""Kills processes under open streams: whether every answer is completed, and with its tokens.

``python -m bench.serve_chaos [--short] [--kills N] [--seed N] [--json]``: one prefill and one
decode worker. Each round opens greedy streams, kills one process (a replica or its engine, of
either role) and compares all token ids with those of an undisturbed run; then it waits
for both roles. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

from bench.serve_model import write_model
from ebbtide.platform.config import parse
from ebbtide.platform.ports import free_run
from ebbtide.platform.process_session import descendants
from ebbtide.serve import job
from ebbtide.serve.config import ServeConfig

MODEL = "bench"
STREAMS, TOKENS = 4, 160
KINDS = ("replica", "engine")
_BACK_S = 300.0


@dataclass
class Stream:
    """One answer: its ids, the gaps between them, and whether it ended as it should."""

    ids: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    is_done: bool = False
    error: str | None = None


async def stream(session: aiohttp.ClientSession, url: str, prompt: str, into: Stream) -> None:
    """Ask for greedy tokens with their ids."""
    body: dict[str, Any] = {
        "model": MODEL,
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


def victims(role: str, kind: str) -> list[psutil.Process]:
    """The processes of a kind that a role has."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if not command.startswith("ray::") or f"{role}:{MODEL}" not in command:
                continue
            family = [psutil.Process(each) for each in descendants(pid)]
            if kind == "replica":
                found.append(process)
            else:
                found += [each for each in family if each.name().startswith("VLLM::EngineCore")]
        except psutil.NoSuchProcess:
            continue
    return found


async def round_of(url: str, prompts: list[str], role: str | None, kind: str) -> list[Stream]:
    """Open the streams; with a role, kill one of its processes once tokens flow."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=180)) as session:
        streams = [Stream() for _ in prompts]
        work = [
            asyncio.create_task(stream(session, url, prompt, into))
            for prompt, into in zip(prompts, streams, strict=True)
        ]
        if role is not None:
            while min(len(each.ids) for each in streams) < random.randrange(5, TOKENS // 2):
                await asyncio.sleep(0.01)
            for process in victims(role, kind)[:1]:
                process.kill()
        await asyncio.gather(*work)
        return streams


def await_both(base: str) -> float:
    """Seconds until both roles are ready again, after they were seen not to be."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < _BACK_S:
        try:
            with urllib.request.urlopen(f"{base}/ready", timeout=5) as answer:
                ready = json.loads(answer.read())
        except (urllib.error.HTTPError, OSError):
            ready = {}
        if ready.get("prefill") and ready.get("decode") and time.monotonic() - began_s > 5:
            return time.monotonic() - began_s
        time.sleep(0.25)
    raise RuntimeError("a killed worker did not come back")


def main() -> None:
    """Run the rounds and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kills = arguments.kills or (20 if arguments.short else 200)
    random.seed(arguments.seed)
    found: list[Stream] = []
    mismatches, back_s = 0, []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        text = f"""{{name: bench, model: {{uri: {folder}, max_model_len: 1024, name: {MODEL}}},
            http: {{port: {free_run(1)}}}, dtype: fp32, mode: split,
            prefill: {{kv_cache_gb: 0.25}}, decode: {{kv_cache_gb: 0.25}}}}"""
        config = parse(text, ServeConfig)
        with job.start(config) as serving:
            prompts = [f"story {i}: " + "the quick brown fox " * (i + 2) for i in range(STREAMS)]
            reference = asyncio.run(round_of(serving.endpoint, prompts, None, ""))
            assert all(each.is_done for each in reference), reference
            for number in range(kills):
                role, kind = random.choice(("prefill", "decode")), random.choice(KINDS)
                if number < len(KINDS):
                    role, kind = "decode", KINDS[number]
                streams = asyncio.run(round_of(serving.endpoint, prompts, role, kind))
                found += streams
                pairs = zip(streams, reference, strict=True)
                wrong = sum(mine.ids != theirs.ids for mine, theirs in pairs)
                mismatches += wrong
                back_s.append(await_both(serving.endpoint.removesuffix("/v1")))
                gap_s = max(max(each.gaps_s) for each in streams)
                print(
                    f"{number + 1}: {role} {kind}: {wrong} wrong, longest gap {gap_s:.2f} s, back "
                    f"after {back_s[-1]:.0f} s {[e.error for e in streams if e.error]}",
                    file=sys.stderr,
                    flush=True,
                )
    worst = sorted(max(each.gaps_s) for each in found)
    result = {
        "kills": kills,
        "streams": len(found),
        "completed_percent": round(100 * sum(e.is_done for e in found) / len(found), 2),
        "token_mismatches": mismatches,
        "gap_p50_s": round(statistics.median(worst), 3),
        "gap_p99_s": round(worst[min(len(worst) - 1, int(len(worst) * 0.99))], 3),
        "back_p50_s": round(statistics.median(back_s), 1),
        "back_max_s": round(max(back_s), 1),
    }
    if not arguments.json:
        for key, value in result.items():
            print(f"{key:20} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
