"""How fast ``ebbtide train`` makes steps, against a loop written by hand with torch and FSDP2.

``python -m bench.trainer --json`` trains a Llama of 5 million parameters (16 micro-batches of 128
tokens a step, ``reduction: plain``), with one and with two workers: under Ray on a local cluster,
and by hand in plain processes, before and after. It prints one line of JSON last:

- ``ratio_vs_plain_torch``: tokens/s of ``ebbtide train`` over the loop's, the worse of 1 and 2
  workers; also each of them. Step times are medians; the loop's is the mean of both its turns.
- ``tokens_per_s_1``, ``tokens_per_s_2``, ``plain_tokens_per_s_1``, ``plain_tokens_per_s_2``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from bench.job import make_job
from bench.plain import PlainLoop
from bench.ranks import run_ranks
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import Step, read_events
from ebbtide.train.job import train

WARM_UP = 5


def by_hand(config: TrainConfig) -> float:
    """Median seconds of a step of the plain loop. On every rank."""
    loop = PlainLoop(config)
    seconds = []
    for number in range(config.steps):
        start_s = time.perf_counter()
        loop.step(number)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[WARM_UP:])


def by_ebbtide(config: TrainConfig, address: str) -> float:
    """Median seconds between two steps of a job."""
    train(config, address=address)
    times = [event.time_s for event in read_events(config.run_uri) if isinstance(event, Step)]
    return statistics.median(b - a for a, b in itertools.pairwise(times[WARM_UP:]))


def measure(folder: Path, steps: int) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for workers in (1, 2):
        job = make_job(
            folder,
            name=f"w{workers}",
            steps=steps,
            reduction="plain",
            workers={"min": workers, "max": workers},
        )
        plain = [run_ranks(workers, by_hand, job)]
        with LocalCluster(workers) as cluster:
            ours_s = by_ebbtide(job, cluster.address)
        plain.append(run_ranks(workers, by_hand, job))
        plain_s = statistics.mean(plain)
        print(f"{workers} workers: ebbtide {ours_s:.4f} s, by hand {plain} s a step", flush=True)
        figures[f"tokens_per_s_{workers}"] = job.tokens_per_step / ours_s
        figures[f"plain_tokens_per_s_{workers}"] = job.tokens_per_step / plain_s
        figures[f"ratio_vs_plain_torch_{workers}"] = plain_s / ours_s
    worse = min(figures["ratio_vs_plain_torch_1"], figures["ratio_vs_plain_torch_2"])
    return {"ratio_vs_plain_torch": worse, **figures}


def main() -> None:
    """Run the benchmark; ``--short`` for a quick look."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    parser.add_argument("--short", action="store_true", help="20 steps instead of 80")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        figures = measure(Path(folder), 20 if arguments.short else 80)
    for name, value in figures.items():
        print(f"{name:28} {value:12.3f}")
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
