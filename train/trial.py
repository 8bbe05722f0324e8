"""Training in this process alone: one rank, no Ray. What a sweep's trial runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ebbtide.platform.clock import SystemClock
from ebbtide.platform.errors import TrainingError
from ebbtide.platform.meter import Meter
from ebbtide.train.config import TrainConfig
from ebbtide.train.handover import Handover
from ebbtide.train.loop import run_generation
from ebbtide.train.manifest import CheckpointInfo
from ebbtide.train.peers import Moment
from ebbtide.train.saver import Missed
from ebbtide.train.step import StepResult

Report = dict[str, float]


class Alone:
    """Surroundings without a world: nothing asks the run to leave, and progress is reported.

    ``report`` is called after every validation; ``last`` is what it was given last. ``handover``
    is told where the training stands by then.
    """

    def __init__(
        self,
        report: Callable[[Report], None],
        meter: Meter | None = None,
        handover: Handover | None = None,
    ) -> None:
        self.meter = meter or Meter(SystemClock())
        self.handover = handover or Handover()
        self.last: Report = {}
        self._tokens = 0  # of the steps made here
        self._report = report
        self._step: Report = {}

    def should_leave(self, step: int) -> str | None:
        return None

    def on_step(self, result: StepResult) -> None:
        self._tokens += result.tokens
        self._step = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": float(result.tokens),
        }

    def on_validation(self, step: int, loss: float) -> None:
        self.last = {"step": float(step), **self._step, "validation_loss": loss}
        self.handover.reached(Moment(step, self._tokens, self._step.get("loss"), loss))
        self._report(self.last)

    def on_checkpoint(self, info: CheckpointInfo, took_s: float) -> None:
        return None

    def on_missed(self, missed: Missed) -> None:
        return None

    def last_events(self, step: int) -> bytes:
        return b""


def run_trial(
    config: TrainConfig,
    report: Callable[[Report], None],
    *,
    checkpoints: bool = False,
    handover: Handover | None = None,
) -> Report:
    """Train from the start in this process; the last report is returned.

    ``report`` is called after every validation with ``step``, ``loss``, ``grad_norm``, ``lr``,
    ``tokens`` and ``validation_loss``; what it raises ends the trial. Nothing is read from or
    written to the run's storage unless ``checkpoints`` is set. With a ``handover`` it begins from
    what that has, and inside ``report`` the state may be saved with it.
    """
    surroundings = Alone(report, handover=handover)
    device = torch.device("cuda" if config.workers.gpus else "cpu")
    with single_process_group(device):
        outcome = run_generation(
            config, 0, surroundings, device, checkpoints=checkpoints, handover=handover
        )
    if not surroundings.last and outcome.loss is not None and outcome.validation_loss is not None:
        return {  # the checkpoint was of the last step already
            "step": float(outcome.step),
            "loss": outcome.loss,
            "validation_loss": outcome.validation_loss,
        }
    return surroundings.last


@contextlib.contextmanager
def single_process_group(device: torch.device) -> Iterator[None]:
    """A process group of this process alone, without a network port; gone afterwards.

    Raises TrainingError if the process is a rank of something already.
    """
    if dist.is_initialized():
        raise TrainingError("this process belongs to a process group already; run it in another")
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's own list of names
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
