"""One step against plain torch: uneven masks, uneven ranks, any grouping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import init_device_mesh

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.errors import TrainingError
from ebbtide.platform.meter import Meter
from ebbtide.train.config import TrainConfig
from ebbtide.train.generation import Generation
from ebbtide.train.loader import StepLoader
from ebbtide.train.loss import cross_entropy
from ebbtide.train.model import build_model
from ebbtide.train.optim import build_optimizer
from ebbtide.train.order import SampleOrder
from ebbtide.train.shard import PlainReduction, shard
from ebbtide.train.step import StepResult, TrainStep, draw_seed
from tests.train.conftest import MakeConfig
from tests.train.ranks import Ranks

LENGTH = 16


class Masked:
    """Sequences of which each counts another number of tokens; the first one none at all."""

    num_sequences = 24

    def sequence(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = np.random.default_rng(i).integers(0, 300, LENGTH + 1)
        labels = tokens[1:].copy()
        labels[(i * 5) % LENGTH :] = -100
        return tokens[:-1], labels


def make_step(config: TrainConfig) -> TrainStep:
    generation = Generation(0, dist.get_rank(), dist.get_world_size(), 0, None)
    model = build_model(config.model, 300, config.seed)
    shard(model, init_device_mesh("cpu", (generation.world_size,)), config.precision)
    order = SampleOrder(Masked.num_sequences, config.batch.global_sequences, config.seed)
    return TrainStep(
        config=config,
        generation=generation,
        device=torch.device("cpu"),
        model=model,
        loss=cross_entropy,
        optimizer=build_optimizer(model, config.optimizer),
        reduction=PlainReduction(model),
        order=order,
        loader=StepLoader(Masked(), order, config.batch.micro_sequences, generation, config.steps),
        meter=Meter(FakeClock()),
    )


def run_steps(config: TrainConfig, steps: int) -> list[StepResult]:
    step = make_step(config)
    try:
        return [step.run(number) for number in range(steps)]
    finally:
        step.loader.close()


def reference(config: TrainConfig, steps: int) -> list[tuple[float, float, int]]:
    """Loss, gradient norm and tokens by a plain loop over the whole batch at once."""
    torch.set_num_threads(1)
    model = build_model(config.model, 300, config.seed)
    optimizer = build_optimizer(model, config.optimizer)
    order = SampleOrder(Masked.num_sequences, config.batch.global_sequences, config.seed)
    found = []
    for number in range(steps):
        pairs = [Masked().sequence(int(i)) for i in order.sample_ids(number)]
        inputs, labels = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
        logits = model(inputs).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm), int((labels != -100).sum())))
    return found


def test_any_grouping_gives_the_gradient_of_the_whole_batch(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    # The schedule is flat, so that the reference needs none.
    flat = {"warmup_steps": 0, "min_lr_ratio": 1.0}
    configs = [
        make_config(
            schedule=flat,
            optimizer={"lr": 1e-3, "clip_norm": 0.5},
            batch={"global_sequences": 12, "micro_sequences": micro},
        )
        for micro in (1, 3, 4)
    ]
    expected = reference(configs[0], 3)
    assert len({tokens for _, _, tokens in expected}) > 1
    for world_size, config in ((1, configs[1]), (2, configs[2]), (3, configs[0]), (4, configs[1])):
        for results in ranks.run(world_size, run_steps, config, 3):
            assert [r.tokens for r in results] == [tokens for _, _, tokens in expected]
            assert [r.loss for r in results] == pytest.approx([e[0] for e in expected], rel=1e-5)
            norms = [r.grad_norm for r in results]
            assert norms == pytest.approx([e[1] for e in expected], rel=1e-4)


def test_only_rank_0_carries_the_sample_ids(ranks: Ranks, make_config: MakeConfig) -> None:
    results = ranks.run(2, run_steps, make_config(), 2)
    order = SampleOrder(Masked.num_sequences, 8, 1)
    assert [r.sample_ids for r in results[0]] == [order.sample_ids(s).tolist() for s in (0, 1)]
    assert [r.sample_ids for r in results[1]] == [None, None]
    assert [r.step for r in results[0]] == [1, 2]


def break_at_2(config: TrainConfig) -> bool:
    """Poison a weight before the second step; is it as it was after the step has failed?"""
    step = make_step(config)
    step.run(0)
    with torch.no_grad():
        next(step.model.parameters()).mul_(math.inf)
    before = [p.detach().to_local().clone() for p in step.model.parameters()]  # type: ignore[attr-defined]
    with pytest.raises(TrainingError, match="step 2: the loss is nan"):
        step.run(1)
    step.loader.close()
    after = [p.detach().to_local() for p in step.model.parameters()]  # type: ignore[attr-defined]
    return all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True)
    )


def test_a_step_that_is_not_finite_is_not_taken(ranks: Ranks, make_config: MakeConfig) -> None:
    assert ranks.run(2, break_at_2, make_config()) == [True, True]


def test_draws_are_seeded_by_position() -> None:
    seeds = {draw_seed(seed, step, m) for seed in range(3) for step in range(3) for m in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**63 for seed in seeds)
