"""Why a trial failed, from what a call to its evaluator raised."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayTaskError

from ebbtide.tune.evaluator import LeaseLost
from ebbtide.tune.running import TrialFailed


def failure_of(error: BaseException) -> TrialFailed:
    """Why a trial failed, from whatever Ray raises for a call to its evaluator."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, TrialFailed):
        return cause
    if isinstance(cause, LeaseLost):
        return TrialFailed(f"another sweep took the evaluator: {cause}", may_retry=True)
    if isinstance(cause, RayActorError):
        evicted = bool(getattr(cause, "preempted", False))
        return TrialFailed("the evaluator died", may_retry=True, evicted=evicted)
    return TrialFailed(f"{type(cause).__name__}: {cause}")


def is_lost(cause: BaseException) -> bool:
    """Whether an evaluator's own error says that the sweep does not hold it any more."""
    return isinstance(cause, LeaseLost)
