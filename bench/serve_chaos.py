"""Kills, hangs and restarts under an endpoint: whether answers are complete, with their tokens.

``python -m bench.serve_chaos [--short] [--kills N] [--hangs N] [--restarts N] [--busy N]
[--seed N] [--json]``: one prefill and one decode worker, and N rounds of each kind, 200 kills (20
with ``--short``) if no number is given. The last line is one JSON document.

A *kill* is of one process (a replica or its engine, of either role) under greedy streams, all token
ids of which are compared with those of an undisturbed run. A *hang* is the same by SIGSTOP; the
process goes on after some seconds, or never, and is then replaced. A *restart* is of one role or of
both, in any order and at any distance, with nothing asked meanwhile; ``serves`` is how long after
both roles are ready an answer has gone through both, and streams then have the same tokens.
A *busy* round does nothing to anyone: two programs a core compute as well, and two clients have
long prompts computed one after the other; ``false_alarms`` is how many requests were taken from
healthy workers as if these hung.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

from bench.serve_faults import (
    HUNG,
    Stream,
    await_another,
    await_both,
    measured,
    round_of,
    under_long_prompts,
    until_split,
    victims,
    worker_names,
)
from bench.serve_model import write_model
from ebbtide.platform.config import parse
from ebbtide.platform.ports import free_run
from ebbtide.serve import job
from ebbtide.serve.config import ServeConfig

MODEL = "bench"
STREAMS = 4
KINDS = ("replica", "engine")
ROLES = ("prefill", "decode")
_NUM_CORES = os.cpu_count() or 1
_SILENT_S = 6.0
"""After this a router has noticed that a worker is gone."""
_STUCK_S = 8.0
"""And after this that its engine does not answer."""


@dataclass
class Seen:
    """What one kind of fault has led to."""

    streams: list[Stream] = field(default_factory=list)
    mismatches: int = 0
    back_s: list[float] = field(default_factory=list)
    serves_s: list[float] = field(default_factory=list)
    false_alarms: int | None = None

    def take(self, streams: list[Stream], reference: list[Stream]) -> str:
        """Count the streams of a round; a line about them."""
        self.streams += streams
        pairs = zip(streams, reference, strict=True)
        wrong = sum(mine.ids != theirs.ids for mine, theirs in pairs)
        self.mismatches += wrong
        gap_s = max((max(each.gaps_s) for each in streams if each.gaps_s), default=0.0)
        errors = [each.error for each in streams if each.error]
        return f"{wrong} wrong, longest gap {gap_s:.2f} s {errors or ''}"

    def summary(self) -> dict[str, float]:
        """Percent, counts and seconds."""
        gaps_s = sorted(max(each.gaps_s, default=0.0) for each in self.streams)
        found = {
            "streams": len(self.streams),
            "completed_percent": round(
                100 * sum(each.is_done for each in self.streams) / len(self.streams), 2
            ),
            "token_mismatches": self.mismatches,
            "gap_p50_s": round(statistics.median(gaps_s), 3),
            "gap_p99_s": round(gaps_s[min(len(gaps_s) - 1, int(len(gaps_s) * 0.99))], 3),
        }
        for name, values in (("back", self.back_s), ("serves", self.serves_s)):
            if values:
                found |= {
                    f"{name}_p50_s": round(statistics.median(values), 1),
                    f"{name}_max_s": round(max(values), 1),
                }
        return found | ({} if self.false_alarms is None else {"false_alarms": self.false_alarms})


class Endpoint:
    """The endpoint under test, and the answers of an undisturbed run."""

    def __init__(self, url: str) -> None:
        self.url, self.base = url, url.removesuffix("/v1")
        self.prompts = [f"story {i}: " + "the quick brown fox " * (i + 2) for i in range(STREAMS)]
        self.reference = asyncio.run(round_of(url, MODEL, self.prompts))
        assert all(each.is_done for each in self.reference), self.reference

    def kill(self, number: int, seen: Seen) -> str:
        role, kind = _drawn(number)
        before = worker_names(self.url, role)

        def strike() -> None:
            _first(role, kind).kill()

        streams = asyncio.run(round_of(self.url, MODEL, self.prompts, strike))
        told = seen.take(streams, self.reference)
        seen.back_s.append(await_another(self.url, role, before))
        return f"{role} {kind}: {told}, back after {seen.back_s[-1]:.0f} s"

    def hang(self, number: int, seen: Seen) -> str:
        role, kind = _drawn(number)
        pause_s = random.choice((3.0, 8.0, None))
        stopped: list[psutil.Process] = []

        def strike() -> None:
            stopped.append(_first(role, kind))
            stopped[0].suspend()

        began_s = time.monotonic()
        streams = asyncio.run(round_of(self.url, MODEL, self.prompts, strike))
        told = seen.take(streams, self.reference)
        if pause_s is not None:
            time.sleep(max(0.0, began_s + pause_s - time.monotonic()))
            with contextlib.suppress(psutil.NoSuchProcess):
                stopped[0].send_signal(signal.SIGCONT)
        seen.back_s.append(await_both(self.base, _STUCK_S))
        how = "for good" if pause_s is None else f"for {pause_s:.0f} s"
        return f"{role} {kind} {how}: {told}, back after {seen.back_s[-1]:.0f} s"

    def busy(self, number: int, seen: Seen) -> str:
        before, programs = measured(self.url, HUNG), [_program() for _ in range(2 * _NUM_CORES)]
        try:
            streams = asyncio.run(under_long_prompts(self.url, MODEL, self.prompts))
        finally:
            for program in programs:
                program.kill()
                program.wait()
        told = seen.take(streams, self.reference)
        seen.false_alarms = (seen.false_alarms or 0) + int(measured(self.url, HUNG) - before)
        return f"all cores: {told}, {seen.false_alarms} false alarms"

    def restart(self, number: int, seen: Seen) -> str:
        roles = random.sample(ROLES, random.choice((1, 2, 2)))
        distance_s = random.uniform(0.0, 8.0)
        for role in roles:
            if role != roles[0]:
                time.sleep(distance_s)
            _first(role, "replica").kill()
        seen.back_s.append(await_both(self.base, _SILENT_S))
        seen.serves_s.append(until_split(self.url, MODEL, 100_000 + number))
        told = seen.take(asyncio.run(round_of(self.url, MODEL, self.prompts)), self.reference)
        return (
            f"{', '.join(roles)}: back after {seen.back_s[-1]:.0f} s, served by both "
            f"{seen.serves_s[-1]:.1f} s later: {told}"
        )


def _drawn(number: int) -> tuple[str, str]:
    role, kind = random.choice(ROLES), random.choice(KINDS)
    return ("decode", KINDS[number]) if number < len(KINDS) else (role, kind)


def _program() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"])


def _first(role: str, kind: str) -> psutil.Process:
    found = victims(MODEL, role, kind)
    if not found:
        raise RuntimeError(f"there is no {role} {kind}")
    return found[0]


def main() -> None:
    """Run the rounds and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    for name in ("kills", "hangs", "restarts", "busy"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.kills + arguments.hangs + arguments.restarts + arguments.busy:
        arguments.kills = 20 if arguments.short else 200
    random.seed(arguments.seed)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        text = f"""{{name: bench, model: {{uri: {folder}, max_model_len: 1024, name: {MODEL}}},
            http: {{port: {free_run(1)}}}, dtype: fp32, mode: split,
            prefill: {{kv_cache_gb: 0.25}}, decode: {{kv_cache_gb: 0.25}}}}"""
        with job.start(parse(text, ServeConfig)) as serving:
            endpoint = Endpoint(serving.endpoint)
            rounds = (
                ("kills", arguments.kills, endpoint.kill),
                ("hangs", arguments.hangs, endpoint.hang),
                ("restarts", arguments.restarts, endpoint.restart),
                ("busy", arguments.busy, endpoint.busy),
            )
            for name, total, strike in rounds:
                seen = Seen()
                for number in range(total):
                    told = strike(number, seen)
                    print(f"{name} {number + 1}: {told}", file=sys.stderr, flush=True)
                if total:
                    prefix = "" if name == "kills" else f"{name}_"
                    result |= {
                        name: total,
                        **{f"{prefix}{k}": v for k, v in seen.summary().items()},
                    }
    if not arguments.json:
        for key, value in result.items():
            print(f"{key:28} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
