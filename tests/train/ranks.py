"""Rank processes that are started once for many tests, and what they run: a recorded generation."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from ebbtide.platform.clock import SystemClock
from ebbtide.platform.errors import EbbtideError
from ebbtide.platform.meter import Meter
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import CheckpointInfo

T = TypeVar("T")

MAX_RANKS = 4
_LIMIT_S = 120
_PRELOADED = [
    "ebbtide.train.loop",
    "pandas",  # by pyarrow, when it first converts
    "torch._dynamo",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]
"""What a rank would import at its first step; the fork server imports it once for all."""


@dataclass
class Recorder:
    """Surroundings that note what happened, and ask to leave after a certain step."""

    leave_after: int | None = None
    steps: list[Any] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)
    saved: list[CheckpointInfo] = field(default_factory=list)
    missed: list[Any] = field(default_factory=list)
    meter: Meter = field(default_factory=lambda: Meter(SystemClock()))

    def should_leave(self, step: int) -> str | None:
        return "the test says so" if step == self.leave_after else None

    def on_step(self, result: Any) -> None:
        self.steps.append(result)

    def on_validation(self, step: int, loss: float) -> None:
        self.validations.append((step, loss))

    def on_checkpoint(self, info: CheckpointInfo, took_s: float) -> None:
        self.saved.append(info)

    def on_missed(self, missed: Any) -> None:
        self.missed.append(missed)

    def last_events(self, step: int) -> bytes:
        return b""


@dataclass(frozen=True)
class Trace:
    """What one rank saw of a generation."""

    outcome: Any
    steps: list[Any]
    validations: list[tuple[int, float]]
    saved: list[CheckpointInfo]


def train(
    config: TrainConfig,
    leave_after: int | None = None,
    folder: str | None = None,
    generation: int = 0,
) -> Trace:
    """One generation on this rank, in a working directory; run by :meth:`Ranks.run`."""
    import torch

    from ebbtide.train.loop import run_generation

    if folder is not None:
        os.chdir(folder)
    recorder = Recorder(leave_after)
    outcome = run_generation(config, generation, recorder, torch.device("cpu"))
    return Trace(outcome, recorder.steps, recorder.validations, recorder.saved)


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    home = os.getcwd()
    while True:
        try:
            rank, world_size, store, job, arguments = connection.recv()
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=_LIMIT_S),
            )
            answer = (job(*arguments), None)
        except EbbtideError as error:
            answer = (None, error)
        except Exception:
            answer = (None, RuntimeError(traceback.format_exc()))
        finally:
            os.chdir(home)
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(answer)


class Ranks:
    """A pool of processes; each run forms a new gloo group of the first ``world_size`` of them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(MAX_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, job: Callable[..., T], *arguments: Any) -> list[T]:
        """``job(*arguments)`` on every rank; raises the first rank's error if any fails."""
        with tempfile.TemporaryDirectory(prefix="ebbtide-ranks-") as folder:
            store = str(Path(folder, "store"))
            used = self._connections[:world_size]
            for rank, connection in enumerate(used):
                connection.send((rank, world_size, store, job, arguments))
            answers: list[tuple[T, Exception | None]] = []
            for rank, connection in enumerate(used):
                if not connection.poll(_LIMIT_S):
                    raise TimeoutError(f"rank {rank} has not answered within {_LIMIT_S} s")
                answers.append(connection.recv())
        for _, error in answers:
            if error is not None:
                raise error
        return [value for value, _ in answers]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()


def first(traces: Sequence[Trace]) -> Trace:
    """Rank 0's trace, after checking that all ranks saw the same steps."""
    for trace in traces[1:]:
        assert [step.loss for step in trace.steps] == [step.loss for step in traces[0].steps]
        assert trace.validations == traces[0].validations
    return traces[0]
