"""Whether a run keeps its bits through any history of world sizes, and what that costs.

``python -m bench.exact --json`` trains in plain processes, one thread each, and prints one line of
JSON last:

- ``identical``: losses, gradient norms, and digests of parameters and optimizer state of every step
  are the same bits for 1, 2, 3 and 4 ranks and for 4 -> 2 -> 3 -> 1 -> 4, in fp32 and in bf16: 200
  steps of a Llama of 0.6 million parameters, of 10 micro-batches of 64 tokens.
- ``step_time_ratio_exact``: step time with ``reduction: exact`` over ``plain``, two ranks, 16
  micro-batches of 128 tokens and 5 million parameters: the worse of fp32 and bf16, and each. Steps
  alternate between the two in the same processes; the ratio is of medians.
- ``loss_difference_vs_plain``: the largest relative difference of a loss, fp32.

With ``--cuda`` all ranks share the first GPU (by way of the host, as NCCL refuses that); the ratio
is of one rank and 830 million parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.job import make_job
from bench.ranks import carry_through_host, run_ranks
from ebbtide.train.config import TrainConfig

if TYPE_CHECKING:
    import torch

WORLD_SIZES = (1, 2, 3, 4)
MIXED = (4, 2, 3, 1, 4)
TINY_BATCH: dict[str, Any] = {"global_sequences": 10, "micro_sequences": 1}
GPU_BATCH: dict[str, Any] = {"batch": {"global_sequences": 32, "micro_sequences": 4}}


def trace(config: TrainConfig, leave_after: int | None) -> list[Any]:
    """Every step of one generation of a run: loss, gradient norm and digests. On every rank."""

    from ebbtide.train.loop import run_generation
    from ebbtide.train.step import StepResult
    from ebbtide.train.trial import Alone

    steps: list[Any] = []

    class Recorder(Alone):
        def should_leave(self, step: int) -> str | None:
            return "the history says so" if step == leave_after else None

        def on_step(self, result: StepResult) -> None:
            steps.append((result.step, result.loss, result.grad_norm, result.digests))

    if config.workers.gpus:
        carry_through_host()
    run_generation(config, 0, Recorder(lambda report: None), device_of(config))
    return steps


def device_of(config: TrainConfig) -> torch.device:
    """Where a job's ranks compute; all on the first GPU, if on any."""
    import torch

    return torch.device("cuda", 0) if config.workers.gpus else torch.device("cpu")


def is_identical(folder: Path, precision: str, steps: int, **changes: Any) -> bool:
    """Whether every history of the job gives the same trace."""

    def run(name: str, worlds: tuple[int, ...]) -> list[Any]:
        job = make_job(
            folder,
            name=f"{name}-{precision}",
            steps=steps,
            precision=precision,
            digest=True,
            **{"size": "tiny", "batch": TINY_BATCH, **changes},
        )
        found = []
        for index, world_size in enumerate(worlds):
            last = index == len(worlds) - 1
            leave = None if last else (index + 1) * steps // len(worlds)
            found += run_ranks(world_size, trace, job, leave)
        return found

    alone = run("w1", (1,))
    others = [run(f"w{size}", (size,)) for size in WORLD_SIZES[1:]] + [run("mixed", MIXED)]
    for name, other in zip(("2", "3", "4", "mixed"), others, strict=True):
        print(
            f"{precision}, world {name}: {'identical' if other == alone else 'DIFFERENT'}",
            flush=True,
        )
    return all(other == alone for other in others)


def alternate(configs: list[TrainConfig], rounds: int) -> list[list[tuple[float, float]]]:
    """Per job, seconds and loss of every step; the jobs take turns, step by step. On every rank."""
    import torch

    from ebbtide.train.exact import make_deterministic
    from ebbtide.train.loop import Training
    from ebbtide.train.trial import Alone

    device = device_of(configs[0])
    surroundings = Alone(lambda report: None)
    make_deterministic(device)
    steps = [
        Training(config, 0, surroundings, device, checkpoints=False).step for config in configs
    ]
    found: list[list[tuple[float, float]]] = [[] for _ in steps]
    for number in range(rounds):
        for index in range(len(steps)) if number % 2 else reversed(range(len(steps))):
            if device.type == "cuda":
                torch.use_deterministic_algorithms(configs[index].reduction == "exact")
            start_s = time.perf_counter()
            result = steps[index].run(number)
            if device.type == "cuda":
                torch.cuda.synchronize()
            found[index].append((time.perf_counter() - start_s, result.loss))
    for step in steps:
        step.loader.close()
    return found


def compare(
    folder: Path, precision: str, rounds: int, world_size: int, **changes: Any
) -> tuple[float, float]:
    """Step time of exact over plain, and the largest relative difference in loss."""
    jobs = [
        make_job(
            folder,
            name=f"time-{kind}",
            steps=rounds,
            precision=precision,
            reduction=kind,
            **changes,
        )
        for kind in ("exact", "plain")
    ]
    backend = "nccl" if jobs[0].workers.gpus else "gloo"
    exact, plain = run_ranks(world_size, alternate, jobs, rounds, backend=backend)
    seconds = [statistics.median(s for s, _ in steps[rounds // 5 :]) for steps in (exact, plain)]
    print(f"{precision}: exact {seconds[0]:.4f} s, plain {seconds[1]:.4f} s a step", flush=True)
    differences = [abs(a - b) / b for (_, a), (_, b) in zip(exact, plain, strict=True)]
    return seconds[0] / seconds[1], max(differences)


def main() -> None:
    """Run the benchmark; ``--short`` for a quick look."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    parser.add_argument("--short", action="store_true", help="20 steps of each history")
    parser.add_argument("--cuda", action="store_true", help="on the first GPU")
    arguments = parser.parse_args()
    steps, rounds = (20, 20) if arguments.short else (200, 60)
    where: dict[str, Any] = {"workers": {"gpus": 1}} if arguments.cuda else {}
    timed = {"size": "large", **GPU_BATCH, **where} if arguments.cuda else {}
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as name:
        folder = Path(name)
        ratios, differences = {}, {}
        for precision in ("fp32", "bf16"):
            ratios[precision], differences[precision] = compare(
                folder, precision, rounds, 1 if arguments.cuda else 2, **timed
            )
        identical = [is_identical(folder, kind, steps, **where) for kind in ("fp32", "bf16")]
    figures = {
        "identical": all(identical),
        "step_time_ratio_exact": round(max(ratios.values()), 4),
        "step_time_ratio_exact_fp32": round(ratios["fp32"], 4),
        "step_time_ratio_exact_bf16": round(ratios["bf16"], 4),
        "loss_difference_vs_plain": differences["fp32"],
    }
    for key, value in figures.items():
        print(f"{key:28} {value}")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
