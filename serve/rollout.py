"""In which steps the workers of one model take the place of those of another: a pure decision.

Where the cluster has room for both, all of the new start beside the old. Elsewhere one worker after
the other gives way, and there is always one that answers: any worker can do all of a request, so a
prefill worker goes first. New requests go to the new workers from the first that is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ebbtide.serve.config import Role

Counts = Mapping[Role, int]
Fits = Callable[[Counts, Counts], bool]
"""Whether so many old workers and so many new ones have room at once."""

_FIRST_TO_START: tuple[Role, ...] = ("decode", "prefill")


@dataclass(frozen=True)
class Step:
    """How many workers there are to be of both; taken when those of the step before are ready."""

    old: Counts
    new: Counts


def steps(old: Counts, new: Counts, fits: Fits) -> list[Step] | None:
    """From ``old`` workers to ``new`` ones; None where that needs a moment with none at all.

    In every step workers start or workers end, never both. Old ones that are the last of theirs
    end in one step.
    """
    left, there = dict(old), dict.fromkeys(new, 0)
    found: list[Step] = []
    while True:
        before = dict(there)
        while (role := _next_to_start(left, there, new, fits)) is not None:
            there[role] += 1
        if there != before:
            found.append(Step(dict(left), dict(there)))
        if there == dict(new):
            break
        if not any(left.values()) or (sum(left.values()) == 1 and not any(there.values())):
            return None
        left[_next_to_end(left, any(there.values()))] -= 1
        found.append(Step(dict(left), dict(there)))
    if any(left.values()):
        found.append(Step(dict.fromkeys(old, 0), dict(there)))
    return found


def _next_to_start(left: Counts, there: Counts, new: Counts, fits: Fits) -> Role | None:
    """The role that lacks the largest part of its workers, of those with room for one more."""
    lacking = sorted(
        (role for role in _FIRST_TO_START if there.get(role, 0) < new.get(role, 0)),
        key=lambda role: there[role] / new[role],
    )
    for role in lacking:
        if fits(left, {**there, role: there[role] + 1}):
            return role
    return None


def _next_to_end(left: Counts, has_new: bool) -> Role:
    """The role that has the most; a prefill worker of as many, and while all depends on the old."""
    if left.get("prefill") and not has_new:
        return "prefill"
    return max(left, key=lambda role: (left[role], role == "prefill"))
