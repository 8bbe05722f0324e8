"""The training loop of one generation, and all that it knows of the world around it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ebbtide.platform.errors import NotFiniteError, StorageError
from ebbtide.platform.meter import Meter, Owner
from ebbtide.train.checkpoint import training_state
from ebbtide.train.collectives import meter_collectives
from ebbtide.train.config import TrainConfig
from ebbtide.train.dataset import TokenDataset
from ebbtide.train.digest import state_digests
from ebbtide.train.exact import ExactReduction, make_deterministic
from ebbtide.train.generation import Generation
from ebbtide.train.handover import Handover
from ebbtide.train.loader import StepLoader
from ebbtide.train.loss import build_loss
from ebbtide.train.manifest import CheckpointInfo
from ebbtide.train.model import build_model, config_json
from ebbtide.train.optim import build_optimizer
from ebbtide.train.order import SampleOrder
from ebbtide.train.peers import Moment
from ebbtide.train.rhythm import NO_INTERRUPTIONS, Interruptions
from ebbtide.train.saver import Missed, Saved, Saver
from ebbtide.train.shard import PlainReduction, Reduction, checkpoint_activations, shard
from ebbtide.train.step import StepResult, TrainStep, Wishes
from ebbtide.train.tiers import open_checkpoints, open_saver, restore
from ebbtide.train.validate import validation_loss

__all__ = ["Outcome", "StepResult", "Surroundings", "Training", "run_generation"]

logger = logging.getLogger(__name__)


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

    def on_checkpoint(self, info: CheckpointInfo, took_s: float) -> None:
        """A checkpoint was committed, ``took_s`` after it was begun; every rank calls in time."""

    def on_missed(self, missed: Missed) -> None:
        """A save came to nothing; rank 0 knows all of them."""

    def last_events(self, step: int) -> bytes:
        """What was told of late of the steps up to this one, for a checkpoint. By rank 0."""


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
    *,
    checkpoints: bool = True,
    skip: Collection[int] = (),
    nodes: Sequence[str] = (),
    interruptions: Interruptions = NO_INTERRUPTIONS,
    handover: Handover | None = None,
) -> Outcome:
    """Train from the newest committed checkpoint to the end, or until the world says to leave.

    Called on every rank with the default process group initialised. Raises TrainingError naming
    the step if the loss is not finite, ConfigError, CheckpointError, DataError, StorageError.
    Without ``checkpoints`` it starts afresh and neither reads nor writes the run's storage. The
    batches of the 1-based steps ``skip`` are left out. ``nodes`` are those of the ranks, if copies
    may be kept in their memory; ``interruptions`` what the run has met before. With a ``handover``,
    which takes the place of checkpoints, it begins from what that has.
    """
    torch.set_num_threads(config.workers.threads)
    if config.reduction == "exact":
        make_deterministic(device)
    with surroundings.meter.measure(Owner.RESTART):
        training = Training(
            config,
            generation_index,
            surroundings,
            device,
            checkpoints,
            skip,
            nodes,
            interruptions,
            handover,
        )
    with contextlib.closing(training.step.loader):
        try:
            return training.run()
        except NotFiniteError:  # on every rank alike
            try:
                training.settle()
            except StorageError as error:
                logger.warning("the save before it could not be stored either: %s", error)
            raise


class Training:
    """One generation: everything that depends on the world is built here, and dropped after."""

    def __init__(
        self,
        config: TrainConfig,
        generation_index: int,
        surroundings: Surroundings,
        device: torch.device,
        checkpoints: bool,
        skip: Collection[int] = (),
        nodes: Sequence[str] = (),
        interruptions: Interruptions = NO_INTERRUPTIONS,
        handover: Handover | None = None,
    ) -> None:
        self.config, self.surroundings, self.device = config, surroundings, device
        self.skip = frozenset(skip)
        sequence_length = config.data.sequence_length
        data = TokenDataset(config.data.uri, "train", sequence_length)
        self.validation = TokenDataset(config.data.uri, "validation", sequence_length)
        self._build(data.index.vocab_size, blank=checkpoints and generation_index > 0)
        self.checkpoints = None
        if checkpoints:
            told = surroundings.last_events
            model_config = config_json(self.model)
            self.checkpoints = open_checkpoints(config, device, model_config, told)
        source, self.start, self.saver = None, None, None
        if self.checkpoints is not None:
            keeps = nodes if config.checkpoint.memory else ()
            source, self.start = restore(self.checkpoints, self.state, keeps)
            if self.start is None and generation_index > 0:  # no generation has saved anything
                del self.model, self.optimizer, self.state  # there may be no room for both
                self._build(data.index.vocab_size)
            self.saver = open_saver(self.checkpoints, self.state, keeps, source, interruptions)
        elif handover is not None:
            self.start = handover.begin(self.state)
        self.generation = Generation(
            index=generation_index,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            first_step=self.start.step if self.start else 0,
            state_source=source,
        )
        order = SampleOrder(data.num_sequences, config.batch.global_sequences, config.seed)
        self.loss = build_loss(config.model)
        self.step = TrainStep(
            config=config,
            generation=self.generation,
            device=device,
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            reduction=self._reduction(),
            order=order,
            loader=StepLoader(
                data, order, config.batch.micro_sequences, self.generation, config.steps
            ),
            meter=surroundings.meter,
            before_end=self._share_copy,
        )
        self.tokens_seen = self.start.tokens_seen if self.start else 0
        self.last_loss = self.start.loss if self.start else None
        self.last_validation = self.start.validation_loss if self.start else None

    def _build(self, vocab_size: int, *, blank: bool = False) -> None:
        """The model, sharded, its optimizer and their tensors; ``blank``: to be restored."""
        config, device = self.config, self.device
        model = build_model(config.model, vocab_size, config.seed, blank=blank).to(device)
        if config.model.activation_checkpointing:
            checkpoint_activations(model)
        shard(model, init_device_mesh(device.type, (dist.get_world_size(),)), config.precision)
        meter_collectives(model, self.surroundings.meter)
        self.model, self.optimizer = model, build_optimizer(model, config.optimizer)
        self.state = training_state(model, self.optimizer)

    def _reduction(self) -> Reduction:
        if self.config.reduction == "plain":
            return PlainReduction(self.model)
        return ExactReduction(
            self.model,
            self.generation,
            self.config.batch.micro_batches,
            self.surroundings.meter,
        )

    def run(self) -> Outcome:
        """The loop. A validation that was due when the last generation left is made up for."""
        finished = self.generation.first_step
        is_missing = self.last_validation is None and not self._leaves_validation
        if finished and is_missing and self._validation_is_due(finished):
            self._validate(finished)
        if finished == self.config.steps and self.generation.state_source == "memory":
            self._save(finished, self.last_validation, must=True)  # the last save had failed
        while finished < self.config.steps:
            finished += 1
            made = self._make(finished) if finished not in self.skip else None
            reason = self.surroundings.should_leave(finished)
            if reason is not None and finished < self.config.steps:
                logger.info("leaving after step %d: %s", finished, reason)
                self._save(finished, None, must=True)
                return Outcome("left", finished, self.last_loss, self.last_validation)
            is_due = self._validation_is_due(finished)
            validated = self._validate(finished) if is_due and not self._leaves_validation else None
            is_last = finished == self.config.steps
            wanted = made is not None and made.wishes.save
            if is_last or wanted or (is_due and self._leaves_validation):
                self._save(finished, validated, must=is_last)
            if self.saver is not None:
                self._tell(self.saver)
        if self.saver is not None:
            self.saver.forget()
        return Outcome("finished", finished, self.last_loss, self.last_validation)

    def _make(self, number: int) -> StepResult:
        """Make the 1-based step."""
        if self.saver is not None and self.generation.rank == 0:
            self.step.wishes = Wishes(self.saver.wants_copy(), self.saver.wants_save(number))
        result = self.step.run(number - 1)
        self.tokens_seen += result.tokens
        self.last_loss = result.loss
        if self.config.digest:
            result = replace(result, digests=state_digests(self.state))
        self.surroundings.on_step(result)
        is_saved = result.wishes.save or number == self.config.steps
        if result.wishes.copy and self.saver is not None and not is_saved:
            with self.surroundings.meter.measure(Owner.CHECKPOINT_STALL):
                self.saver.keep(Moment(number, self.tokens_seen, self.last_loss, None))
        return result

    def _share_copy(self) -> None:
        """See to it that the copy of an earlier step is with the peers."""
        if self.saver is not None:
            with self.surroundings.meter.measure(Owner.CHECKPOINT_STALL):
                self.saver.share()

    @property
    def _leaves_validation(self) -> bool:
        """Whether others validate, from the checkpoints."""
        return self.config.validation.where == "pool" and self.saver is not None

    def _validation_is_due(self, finished: int) -> bool:
        every = self.config.validation.every_steps
        return finished == self.config.steps or (every > 0 and finished % every == 0)

    def _validate(self, finished: int) -> float:
        with self.surroundings.meter.measure(Owner.VALIDATION):
            loss = validation_loss(
                self.model,
                self.loss,
                self.validation,
                self.config.validation.sequences,
                self.config.batch.micro_sequences,
                self.generation,
                self.device,
            )
        self.last_validation = loss
        self.surroundings.on_validation(finished, loss)
        return loss

    def settle(self) -> None:
        """Wait until the save at work is committed. Raises what went wrong with it."""
        if self.saver is None:
            return
        try:
            with self.surroundings.meter.measure(Owner.CHECKPOINT_STALL):
                saved = self.saver.wait()
        except StorageError:
            self._tell(self.saver)
            raise
        self._tell(self.saver, saved)

    def _save(self, finished: int, validated: float | None, must: bool = False) -> None:
        """Begin a save; see one through that ``must`` be made."""
        if self.saver is None:
            return
        with self.surroundings.meter.measure(Owner.CHECKPOINT_STALL):
            moment = Moment(finished, self.tokens_seen, self.last_loss, validated)
            self.saver.begin(moment, must=must)
        if must:
            self.settle()

    def _tell(self, saver: Saver, saved: Sequence[Saved] = ()) -> None:
        for each in (*saved, *saver.take()):
            self.surroundings.on_checkpoint(each.info, each.took_s)
        for missed in saver.missed():
            self.surroundings.on_missed(missed)
