"""Training in this process alone: one rank, no Ray. What a sweep's trial runs."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.train.config import TrainConfig


def run_trial(
    config: TrainConfig, report: Callable[[dict[str, float]], None], *, checkpoints: bool = False
) -> dict[str, float]:
    """Train from the start in this process; the last report is returned.

    ``report`` is called after every validation with ``step``, ``loss``, ``grad_norm``, ``lr``,
    ``tokens`` and ``validation_loss``; what it raises ends the trial. Nothing is read from or
    written to the run's storage unless ``checkpoints`` is set.
    """
    raise NotImplementedError
