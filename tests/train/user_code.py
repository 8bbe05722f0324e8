"""A user's own losses, as job files name them: ``tests.train.user_code:slow_loss``."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from ebbtide.train.loss import cross_entropy

PASS_S = 0.08


def slow_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """The usual loss, so slowly that there is time for something to happen between two steps."""
    time.sleep(PASS_S)
    return cross_entropy(output, labels)


def failing_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Raises on the last rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("boom in user code")
    return cross_entropy(output, labels)
