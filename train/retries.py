"""What a run is forgiven: a pure rule over the failures it has had.

Promises: a lost node is never held against the job; a crash of user code at most ``max_failures``
times, and not twice at the same step; what would come again the same way (bad data, a loss that is
not finite) ends the run at once with its own message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ebbtide.platform.errors import NotFiniteError
from ebbtide.train.failures import Cause, Failure

_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class Verdict:
    """Whether to go on after a failure, whether it is ``counted``, and how long to wait before.

    ``skip`` is a 1-based step whose batch is left out from now on.
    """

    go_on: bool
    counted: bool = False
    wait_s: float = 0.0
    skip: int | None = None


class Retries:
    """What a run is forgiven. It remembers the failures it has judged.

    Lost nodes are forgiven without end. A process that was killed while its node lives, and a crash
    of user code, count against ``max_failures``; the first only if the run has come no further
    since the last one, for processes are killed from outside, too. A crash that comes again at the
    same step ends the run, and counted failures are followed by a pause that doubles. A loss that
    is not finite ends the run, unless ``skip_bad_batch`` allows one batch to be left out.
    """

    def __init__(self, max_failures: int, skip_bad_batch: bool) -> None:
        self._left, self._skip_bad_batch = max_failures, skip_bad_batch
        self._counted = 0
        self._furthest = -1
        self._last_crash: int | None = None

    def judge(self, failure: Failure, step: int, skipped: Sequence[int]) -> Verdict:
        """``step`` steps were finished when it failed; the batches of ``skipped`` are left out."""
        stuck = step <= self._furthest
        self._furthest = max(step, self._furthest)
        match failure.cause:
            case Cause.NODE_LOST:
                return Verdict(go_on=True)
            case Cause.KILLED if not stuck:
                return Verdict(go_on=True)
            case Cause.NOT_FINITE if self._skip_bad_batch and not skipped:
                assert isinstance(failure.error, NotFiniteError)
                return Verdict(go_on=True, skip=failure.error.step)
            case Cause.NOT_FINITE | Cause.FINAL:
                return Verdict(go_on=False)
            case Cause.CRASH:
                again = self._last_crash == step
                self._last_crash = step
                if again:
                    return Verdict(go_on=False, counted=True)
            case _:
                pass
        self._counted += 1
        wait_s = min(_LONGEST_WAIT_S, 2.0 ** (self._counted - 1))
        return Verdict(self._counted <= self._left, counted=True, wait_s=wait_s)
