"""One optimizer step over the global batch, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """One finished step, the same on every rank but for ``seconds`` (this rank's own).

    ``step`` counts from 1: after it, that many steps are finished. ``loss`` is the mean over the
    ``tokens`` unmasked tokens of the global batch, in nats; ``grad_norm`` is before clipping.
    ``sample_ids`` are the global batch in order, on rank 0 only.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    epoch: int
    sample_ids: Sequence[int] | None
    seconds: Mapping[str, float]
