"""A running endpoint is watched, asked to do something, and ended by signals."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.config import parse
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.control import Ask, Control
from ebbtide.serve.engine import Site
from ebbtide.serve.interrupts import Interrupts
from ebbtide.serve.routers import Routers
from ebbtide.serve.serving import Serving
from ebbtide.serve.startup import Progress
from ebbtide.serve.workers import Workers


class _Interrupting(FakeClock):
    """Time in which a signal arrives after ``at_s``."""

    def __init__(self, number: int, at_s: float) -> None:
        super().__init__()
        self._number, self._at_s = number, at_s

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.now_s >= self._at_s:
            os.kill(os.getpid(), self._number)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Workers that all run, each time they are looked at."""
    found: list[int] = []

    def progress(workers: Workers) -> Progress:
        found.append(workers.generation)
        return Progress("running", "")

    monkeypatch.setattr(Workers, "progress", progress)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return found


def serving(clock: FakeClock, end: Callable[[], None] = lambda: None) -> Serving:
    """An endpoint without processes."""
    config = parse("{name: tide, model: {uri: out}}", ServeConfig)
    resources = contextlib.ExitStack()
    interrupts = resources.enter_context(Interrupts())
    resources.callback(end)
    workers = Workers(config, Site({}, True, (), "token"))
    return Serving(workers, Routers(config, []), resources, interrupts, clock)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_the_wait(
    looked: list[int], number: int, expected: type[BaseException]
) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    ended: list[str] = []
    clock = _Interrupting(number, at_s=35)
    with pytest.raises(expected), serving(clock, lambda: ended.append("ended")) as it:
        it.wait()
    assert looked == [1] * 3
    assert ended == ["ended"]
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]


def test_what_would_be_better_is_said_once(
    looked: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Routers, "prefills", lambda self: {"local": 1000, "remote": 0})
    monkeypatch.setattr(logging.getLogger("ebbtide"), "propagate", True)
    caplog.set_level(logging.INFO, "ebbtide")
    clock = _Interrupting(signal.SIGINT, at_s=200)
    with pytest.raises(KeyboardInterrupt), serving(clock) as it:
        it.wait()
    assert len({id(each) for each in caplog.records if "colocated" in each.message}) == 1


def test_an_update_that_fails_ends_nothing(
    looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Serving, *_: object) -> None:
        raise RuntimeError("that nobody thought of")

    asked = Ask({"update": "out"})
    monkeypatch.setattr(Serving, "update", failing)
    monkeypatch.setattr(Control, "next", lambda self: asked)
    with (
        pytest.raises(KeyboardInterrupt),
        serving(_Interrupting(signal.SIGINT, at_s=1)) as it,
    ):
        it.wait()
    told = asked._lines.get_nowait()
    assert "nobody thought of" in told["error"] and told["exit_code"] == 8


@pytest.mark.parametrize("how", ["not there", "anybody's", "too long"])
def test_an_endpoint_serves_where_it_cannot_be_asked(
    looked: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    base = tmp_path / ("x" * 100 if how == "too long" else how)
    if how != "not there":
        (base / "ebbtide").mkdir(parents=True, mode=0o755 if how == "anybody's" else 0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    with (
        pytest.raises(KeyboardInterrupt),
        serving(_Interrupting(signal.SIGINT, at_s=35)) as it,
    ):
        it.wait()
    assert looked == [1] * 3


def test_a_second_signal_does_not_cut_the_end_short() -> None:
    ended: list[str] = []

    def end() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        ended.append("ended")

    with pytest.raises(KeyboardInterrupt), serving(FakeClock(), end):
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the signal did not raise")
    assert ended == ["ended"]
