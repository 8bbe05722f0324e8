"""The learning rate is a function of the step; the optimizer's state is there from the start."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ebbtide.train.config import OptimizerConfig, ScheduleConfig
from ebbtide.train.optim import build_optimizer, learning_rate, set_learning_rate


def test_warm_up_then_cosine() -> None:
    schedule = ScheduleConfig(warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(1.0, schedule, step, 40) for step in range(40)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[24] == pytest.approx(0.55)  # half-way down
    assert rates[39] == pytest.approx(0.1)
    assert all(after <= before for before, after in zip(rates[9:], rates[10:], strict=False))


@given(st.integers(1, 200), st.data())
def test_the_rate_stays_within_its_bounds(steps: int, data: st.DataObject) -> None:
    schedule = ScheduleConfig(
        warmup_steps=data.draw(st.integers(0, steps)), min_lr_ratio=data.draw(st.floats(0, 1))
    )
    step = data.draw(st.integers(0, steps - 1))
    rate = learning_rate(3e-4, schedule, step, steps)
    assert 0 <= rate <= 3e-4 * (1 + 1e-12)
    if schedule.warmup_steps == 0 or step >= schedule.warmup_steps:
        assert rate >= 3e-4 * schedule.min_lr_ratio * (1 - 1e-12)


def test_only_matrices_decay_and_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=0.5))
    decaying, others = optimizer.param_groups
    assert [tuple(p.shape) for p in decaying["params"]] == [(3, 3)]
    assert decaying["weight_decay"] == 0.5 and others["weight_decay"] == 0
    assert len(others["params"]) == 4
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_the_state_from_the_start_changes_no_result() -> None:
    def trained(prepared: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = build_optimizer(model, OptimizerConfig(lr=0.1))
        if not prepared:
            optimizer.state.clear()
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    assert torch.equal(trained(True), trained(False))
