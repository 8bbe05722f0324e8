"""AdamW and the learning rate, both functions of (configuration, step) and the state alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from ebbtide.train.config import OptimizerConfig, ScheduleConfig

_VECTOR = 16  # fp32 numbers in the widest vector (AVX-512)


def learning_rate(peak: float, schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The rate of a 0-based step: linear warm-up to ``peak``, then a cosine.

    The last warm-up step has the peak, the run's last step ``min_lr_ratio`` of it.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    progress = min(1.0, (step + 1 - schedule.warmup_steps) / (steps - schedule.warmup_steps))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * cosine)


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; only matrices decay, norms and biases do not.

    The state exists from the start (zeros), so that every save and load knows the same tensors.
    An element's update has the same bits in whatever shard it lies (see :func:`_may_fuse`).
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        decay = config.weight_decay if parameter.ndim >= 2 else 0.0
        groups.setdefault((decay, _may_fuse(parameter)), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": members, "weight_decay": decay, "fused": fused}
            for (decay, fused), members in groups.items()
        ],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def _may_fuse(parameter: nn.Parameter) -> bool:
    """Whether the fused kernel computes every element alike.

    On CPUs it takes the last elements of a shard, and of each thread's part of it, one by one, and
    rounds them otherwise than full vectors; shards are whole rows.
    """
    if parameter.device.type != "cpu":
        return True
    row = math.prod(parameter.shape[1:])
    return row % _VECTOR == 0 and torch.get_num_threads() == 1


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr
