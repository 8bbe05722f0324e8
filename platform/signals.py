"""Ctrl-C and SIGTERM as exceptions: they unwind a command and give it its exit code.

Promises: SIGINT ends a command with 130 and SIGTERM with 143, wherever it meets it. While the first
unwinds, a further one of either kind does nothing: it neither cuts the cleaning up short nor
changes the exit code. One whose exception was swallowed on the way does not count; the next raises.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Iterator
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; a command ends with exit code 130.

    Not KeyboardInterrupt itself: of one that leaves ``exec`` of a string CPython takes note, and at
    its end dies by SIGINT, whatever exit code was asked for (``run_eval_code_obj`` and
    ``exit_sigint``). Dataclasses and named tuples are made by such an ``exec``, so that any import
    may be at one.
    """


class Terminated(SystemExit):
    """SIGTERM; its code is 143."""


_latest: weakref.ref[BaseException] | None = None
_arrivals: list[int] = []


def arrived(number: int) -> BaseException:
    """The exception to raise for a signal; it counts as unwinding for as long as it exists."""
    global _latest
    _arrivals.append(number)
    error = Interrupted() if number == signal.SIGINT else Terminated(128 + number)
    _latest = weakref.ref(error)
    return error


def is_unwinding() -> bool:
    """Whether the exception of a signal is on its way, or the cause of the one that is."""
    return _latest is not None and _latest() is not None


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """The whole of a command, in the main thread: signals raise; exit codes are as promised.

    After one has come the process ignores them, as its interpreter ends: CPython puts the default
    action back there. A SIGINT that is ignored from the start (a shell's background job) stays so.
    """
    for number in NUMBERS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        if is_unwinding():
            for number in NUMBERS:
                signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """For a call that installs handlers of its own: afterwards those of before are back."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def renewed() -> Iterator[None]:
    """For calls that catch a signal's exception and raise one of their own in its place.

    Ray's do, with exit code 1 (``check_signals`` of its core worker). The signal's is raised again.
    """
    before = len(_arrivals)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, Interrupted | Terminated) or len(_arrivals) == before:
            raise
        raise arrived(_arrivals[-1]) from None


def _raise(number: int, frame: FrameType | None) -> None:
    if not is_unwinding():
        raise arrived(number)
