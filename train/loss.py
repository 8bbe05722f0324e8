"""The training loss: a sum over unmasked tokens, so that it can be cut anywhere and added up.

A loss takes what the model returned and the labels, int64 ``[batch, sequence]``, in which -100
marks a token that does not count, and returns the **sum** over the tokens that do. The division by
their number in the whole global batch is the step's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ebbtide.platform.errors import TrainingError
from ebbtide.train.config import ModelConfig
from ebbtide.train.model import resolve

IGNORE_LABEL = -100

Loss = Callable[[Any, Tensor], Tensor]


def cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """Next-token cross-entropy in nats, computed in fp32 and summed over unmasked tokens."""
    logits: Tensor = getattr(output, "logits", output)
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
    )


def build_loss(config: ModelConfig) -> Loss:
    """Cross-entropy, or the user's own ``module:function``, called with (output, labels)."""
    if config.loss is None:
        return cross_entropy
    name, function = config.loss, resolve(config.loss)

    def checked(output: Any, labels: Tensor) -> Tensor:
        loss = function(output, labels)
        if not isinstance(loss, Tensor) or loss.shape != torch.Size([]):
            found = (
                f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise TrainingError(
                f"{name} must return a scalar, the sum over unmasked tokens: {found}"
            )
        return loss

    return checked


def count_tokens(labels: Tensor) -> int:
    """How many tokens of the labels count."""
    return int((labels != IGNORE_LABEL).sum())
