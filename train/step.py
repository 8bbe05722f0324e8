"""One optimizer step over the global batch, whatever the number of ranks.

The gradient is the sum over the unmasked tokens of the global batch, divided by their global
number. A micro-batch's random draws are seeded by (seed, step, number of the micro-batch) and its
loss has one owner, so neither depends on which rank ran it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ebbtide.platform.errors import NotFiniteError
from ebbtide.platform.meter import Meter, Owner
from ebbtide.train.agree import total
from ebbtide.train.config import TrainConfig
from ebbtide.train.generation import Generation
from ebbtide.train.loader import MicroBatch, StepLoader
from ebbtide.train.loss import Loss, count_tokens
from ebbtide.train.optim import learning_rate, set_learning_rate
from ebbtide.train.order import SampleOrder
from ebbtide.train.shard import Reduction

_WORK = (Owner.COMPUTE, Owner.DATA_STALL)


@dataclass(frozen=True)
class Wishes:
    """What rank 0 wants to be done after a step: a copy into memory, a save into storage."""

    copy: bool = False
    save: bool = False


NO_WISHES = Wishes()


@dataclass(frozen=True)
class StepResult:
    """One finished step, the same on every rank but for ``seconds`` and ``sample_ids``.

    ``step`` counts from 1: after it, that many steps are finished. ``loss`` is the mean over the
    ``tokens`` unmasked tokens of the global batch, in nats; ``grad_norm`` is from before clipping.
    ``sample_ids`` are the global batch in order, on rank 0 only. ``seconds`` is where this rank's
    time went since its last result, by owner. ``busy_s`` is how long each rank worked, not waited,
    in the step before (0 in the first); ``wishes`` are what rank 0 wished before the step.
    ``digests`` are of the training state, by tensor, where the job wants them.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    epoch: int
    sample_ids: Sequence[int] | None
    seconds: Mapping[Owner, float]
    busy_s: Sequence[float] = ()
    wishes: Wishes = NO_WISHES
    digests: Mapping[str, str] | None = None


def draw_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of a micro-batch's random draws."""
    text = f"{seed}/{step}/{micro_batch}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


@dataclass
class TrainStep:
    """All that a step works with, built for one generation."""

    config: TrainConfig
    generation: Generation
    device: torch.device
    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    reduction: Reduction
    order: SampleOrder
    loader: StepLoader
    meter: Meter
    wishes: Wishes = NO_WISHES
    before_end: Callable[[], None] = lambda: None
    """Called by every rank before any of them can finish the step."""
    _busy_s: float = 0.0

    def run(self, step: int) -> StepResult:
        """Make the 0-based step. Raises NotFiniteError if its loss or gradient is not finite."""
        rank = self.generation.rank
        self.meter.step = step + 1
        with self.meter.measure(Owner.COMPUTE):
            with self.meter.measure(Owner.DATA_STALL):
                passes = self.loader.take(step)
            tokens = self._count(passes)
            loss, busy_s, wishes = self._accumulate(step, passes, tokens)
            grad_norm = self.reduction.clip(self.config.optimizer.clip_norm)
            _require_finite(step + 1, loss, grad_norm)
            lr = learning_rate(
                self.config.optimizer.lr, self.config.schedule, step, self.config.steps
            )
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        seconds = self.meter.take()
        self._busy_s = sum(seconds.get(owner, 0.0) for owner in _WORK)
        return StepResult(
            step=step + 1,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            epoch=self.order.epoch(step),
            sample_ids=self.order.sample_ids(step).tolist() if rank == 0 else None,
            seconds=seconds,
            busy_s=busy_s,
            wishes=wishes,
        )

    def _count(self, passes: Sequence[MicroBatch]) -> int:
        """The unmasked tokens of the global batch."""
        own = sum(count_tokens(one.labels) for one in passes if one.number is not None)
        with self.meter.measure(Owner.NETWORK_STALL):
            return int(total(torch.tensor(own, device=self.device)))

    def _accumulate(
        self, step: int, passes: Sequence[MicroBatch], tokens: int
    ) -> tuple[float, list[float], Wishes]:
        """Run the passes, leave the gradient on the parameters.

        Returns the global mean loss, every rank's working seconds of the step before, and wishes.
        """
        micro_batches, world_size = self.config.batch.micro_batches, self.generation.world_size
        shared = torch.zeros(micro_batches + world_size + 2, dtype=torch.float64)
        shared[micro_batches + self.generation.rank] = self._busy_s
        if self.generation.rank == 0:
            shared[-2:] = torch.tensor([self.wishes.copy, self.wishes.save])
        shared = shared.to(self.device)
        for round_index, one in enumerate(passes):
            self.reduction.start_round(round_index, len(passes))
            torch.manual_seed(draw_seed(self.config.seed, step, one.number or 0))
            output = self.model(one.inputs.to(self.device))
            value = self.loss(output, one.labels.to(self.device))
            weight = 0.0 if one.number is None else 1.0 / max(tokens, 1)
            torch.autograd.backward(value * weight)
            if one.number is not None:
                shared[one.number] = value.detach()
        self.before_end()
        with self.meter.measure(Owner.NETWORK_STALL):
            known = total(shared).tolist()
        loss = float(sum(known[:micro_batches])) / max(tokens, 1)
        copy, save = known[-2:]
        return loss, known[micro_batches:-2], Wishes(bool(copy), bool(save))


def _require_finite(step: int, loss: float, grad_norm: float) -> None:
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    raise NotFiniteError(
        f"step {step}: the loss is {loss:g} and the gradient's norm {grad_norm:g}; the step is not "
        "taken and nothing of it is saved. Lower optimizer.lr, lengthen schedule.warmup_steps, or "
        "look at the data",
        step,
    )
