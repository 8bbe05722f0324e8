"""What a failed generation means for the run: pure classification of the ranks' errors.

When one rank fails, the others fail after it with errors of their own collectives; those say
nothing: the error that says most is taken for all. What follows from it is
:mod:`ebbtide.train.retries`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ebbtide.platform.errors import EbbtideError, NotFiniteError, StorageError, TrainingError
from ebbtide.platform.ray_seam.decisions import ProcessLost

_COLLECTIVE = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|Connection refused|Broken pipe"
    r"|NCCL (error|communicator)|ProcessGroup(NCCL|Gloo)|store.*(recvValue|sendBytes)",
    re.IGNORECASE,
)


class PeerLost(Exception):
    """A collective failed on this rank because another rank is gone."""


class UserCrash(Exception):
    """An error of user code on a rank, as text: its own class may not exist where it is read."""


class Released(Exception):
    """No failure: this rank has saved, and ends so that its node is free while the run waits."""


class Cause(StrEnum):
    """Why a generation ended before its time."""

    NODE_LOST = "node lost"
    KILLED = "killed"
    CRASH = "crash"
    NOT_FINITE = "not finite"
    FINAL = "final"


@dataclass(frozen=True)
class Failure:
    """A failed generation: why, on which rank first, and the error that says most."""

    cause: Cause
    rank: int
    error: Exception

    @property
    def message(self) -> str:
        """For a person, with the original message."""
        if isinstance(self.error, EbbtideError):
            return str(self.error)
        return f"rank {self.rank}: {self.error}"


def portable(error: Exception) -> Exception:
    """A rank's error as it is sent to the controller: PeerLost, UserCrash, or one of our tree."""
    import torch.distributed as dist

    if isinstance(error, EbbtideError | Released):
        return error
    text = f"{type(error).__name__}: {error}"
    distributed = isinstance(error, dist.DistError)
    if distributed or (isinstance(error, RuntimeError) and _COLLECTIVE.search(str(error))):
        return PeerLost(text)
    return UserCrash(text)


def classify(errors: Mapping[int, Exception], node_is_lost: bool) -> Failure:
    """The meaning of the ranks' errors. ``node_is_lost``: a node of the generation is gone."""
    by_weight = sorted(errors.items(), key=lambda item: (_weight(item[1]), item[0]))
    rank, error = by_weight[0]
    if isinstance(error, NotFiniteError):
        return Failure(Cause.NOT_FINITE, rank, error)
    if _is_final(error):
        return Failure(Cause.FINAL, rank, error)
    if isinstance(error, PeerLost | ProcessLost):
        cause = Cause.NODE_LOST if node_is_lost else Cause.KILLED
        return Failure(cause, rank, error)
    return Failure(Cause.CRASH, rank, error)


def _is_final(error: Exception) -> bool:
    return isinstance(error, EbbtideError) and not isinstance(error, StorageError)


def _weight(error: Exception) -> int:
    if _is_final(error):
        return 0
    if isinstance(error, PeerLost):
        return 3
    return 2 if isinstance(error, ProcessLost) else 1


def to_raise(failure: Failure) -> EbbtideError:
    """The error that the run ends with."""
    if isinstance(failure.error, EbbtideError):
        return failure.error
    return TrainingError(f"training failed: {failure.message}")
