"""The training loop of one generation, and all that it knows of the world around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ebbtide.platform.meter import Meter
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import CheckpointInfo
from ebbtide.train.step import StepResult

if TYPE_CHECKING:
    import torch

__all__ = ["Outcome", "StepResult", "Surroundings", "run_generation"]


class Surroundings(Protocol):
    """What the loop knows of the world. Every rank has one; the calls come in the same order."""

    @property
    def meter(self) -> Meter:
        """Books this rank's time to its owners."""

    def should_leave(self, step: int) -> str | None:
        """Asked by every rank after every finished step: why the run has to leave, or None.

        Must answer the same on every rank. The loop then saves and returns.
        """

    def on_step(self, result: StepResult) -> None:
        """A step has finished on this rank."""

    def on_validation(self, step: int, loss: float) -> None:
        """The validation loss after ``step`` steps; the same on every rank."""

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        """A checkpoint has been committed; called on every rank."""


@dataclass(frozen=True)
class Outcome:
    """How a generation ended: the run is finished, or it has saved and left.

    ``step`` counts finished steps; the losses are the last ones known, also from the checkpoint.
    """

    status: Literal["finished", "left"]
    step: int
    loss: float | None
    validation_loss: float | None


def run_generation(
    config: TrainConfig,
    generation_index: int,
    surroundings: Surroundings,
    device: torch.device,
) -> Outcome:
    """Train from the newest committed checkpoint to the end, or until the world says to leave.

    Called on every rank with the default process group initialised. Raises TrainingError naming
    the step if the loss is not finite, CheckpointError, DataError, StorageError.
    """
    raise NotImplementedError
