"""What is asked of two routers, of which one does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ebbtide.platform.config import parse
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.routers import Routers

DEAD = ray.exceptions.ActorDiedError()
SILENT = ray.exceptions.GetTimeoutError()
AWAY = ray.exceptions.ActorUnavailableError("restarting", None)


def routers(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> Routers:
    """Routers, each of which gives the same answer to everything, or raises it."""

    def get(answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    config = parse("{name: tide, model: {uri: out}}", ServeConfig)
    asked = [SimpleNamespace(remote=lambda *_, answer=each: answer) for each in answers]
    return Routers(config, [SimpleNamespace(num_at_work=each, ready=each) for each in asked])


@pytest.mark.parametrize("silent", [SILENT, AWAY])
def test_requests_of_a_router_that_is_only_silent_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, silent: Exception
) -> None:
    assert routers(monkeypatch, 0, silent).num_at_work(1) > 0
    assert routers(monkeypatch, silent, silent).num_at_work(1) > 0


def test_those_of_a_dead_one_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert routers(monkeypatch, DEAD, 0).num_at_work(1) == 0
    assert routers(monkeypatch, DEAD, 3).num_at_work(1) == 3


@pytest.mark.parametrize(
    ("other", "expected"), [(SILENT, 0), (AWAY, 0), (DEAD, 2), ({"prefill": 1, "decode": 1}, 1)]
)
def test_workers_are_ready_when_every_living_router_says_so(
    monkeypatch: pytest.MonkeyPatch, other: Any, expected: int
) -> None:
    found = routers(monkeypatch, {"prefill": 2, "decode": 2}, other).ready(1)
    assert found == {"prefill": expected, "decode": expected}
