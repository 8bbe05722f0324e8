"""Decisions that all ranks share, errors included. Every function here is collective.

A rank that raises outside of these functions has failed: it issues no further collective, and the
others learn of it by the process group's own error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ebbtide.platform.errors import EbbtideError, TrainingError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def _portable(error: Exception) -> EbbtideError:
    """An error that travels to other ranks."""
    if isinstance(error, EbbtideError):
        return error
    logger.error("this rank has failed", exc_info=error)
    return TrainingError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")


def from_first(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``action`` gives on rank 0, on every rank; if it raises there, it raises everywhere."""
    answer: list[tuple[T | None, EbbtideError | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            answer[0] = (action(), None)
        except Exception as error:
            answer[0] = (None, _portable(error))
    dist.broadcast_object_list(answer, src=0, group=group)
    value, failure = answer[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # None only where T allows it


def everywhere(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Each rank's own result; if ``action`` raises on any rank, that error on every rank."""
    value: T | None = None
    failure: EbbtideError | None = None
    try:
        value = action()
    except Exception as error:
        failure = _portable(error)
    failures: list[EbbtideError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)
    for found in failures:
        if found is not None:
            raise found
    return value  # type: ignore[return-value]  # None only where T allows it


def total(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The sum over ranks, in place: exact for integers, and where one rank owns each entry."""
    dist.all_reduce(values, group=group)
    return values
