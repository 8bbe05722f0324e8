"""The way to another model, over workers that are only counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ebbtide.platform.clock import FakeClock
from ebbtide.platform.config import parse
from ebbtide.platform.errors import ClusterError, ServeError
from ebbtide.serve import cluster
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import Site, num_ports, side_channel_ports
from ebbtide.serve.update import Update, next_site


def config(text: str = "") -> ServeConfig:
    return parse(f"{{name: tide, model: {{uri: out}}{text}}}", ServeConfig)


@dataclass
class Counted:
    """One generation's workers, of which there are as many as are wanted. ``fails_at``: how many
    starts succeed."""

    generation: int
    log: list[str]
    config: ServeConfig = field(default_factory=config)
    fails_at: int | None = None

    def scale(self, counts: Mapping[str, int]) -> None:
        self.log.append(f"{self.generation}: {counts['prefill']}+{counts['decode']}")

    def await_ready(self, counts: Any, routers: Any, at: float, clock: Any, pause: Any, say: Any):  # type: ignore[no-untyped-def]
        pause(1.0)
        if self.fails_at == 0:
            raise ServeError("it does not load")
        self.fails_at = None if self.fails_at is None else self.fails_at - 1

    def retire(self, routers: Any, drain_s: float, clock: Any, pause: Any, say: Any) -> int:
        self.log.append(f"{self.generation}: end")
        return 0


class Led:
    """The routers."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def lead(self, generations: set[int], pause: Any) -> None:
        self.log.append(f"to {sorted(generations)}")

    def warm_up(self, generation: int) -> None:
        self.log.append(f"{generation}: warm")


@dataclass
class Way:
    update: Update
    log: list[str]
    said: list[str]


def way(
    monkeypatch: pytest.MonkeyPatch, cpus: int, *, fails_at: int | None = None, **more: Any
) -> Way:
    monkeypatch.setattr(cluster, "nodes", lambda: [{"CPU": float(cpus)}])
    log: list[str] = []
    said: list[str] = []
    clock = FakeClock()
    workers: list[Any] = [Counted(1, log), Counted(2, log, fails_at=fails_at)]
    routers: Any = Led(log)
    counts = config().counts
    old, new = workers
    update = Update(old, new, counts, counts, routers, clock, clock.sleep, said.append, **more)
    return Way(update, log, said)


BESIDE = ["2: 1+1", "2: warm", "to [2]", "to [2]", "1: end"]
ONE_BY_ONE = ["1: 0+1", "2: 0+1", "2: warm", "to [1, 2]", "to [2]", "1: end", "2: 1+1"]


def test_with_room_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=4)
    it.update.run()
    assert it.log == BESIDE and it.update.is_taken
    assert it.said == ["requests are led to the new model"]


def test_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=2)
    it.update.run()
    assert it.log == ONE_BY_ONE and it.update.is_taken
    assert "no room" in it.said[0]


def test_without_any_room_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=0)
    it.update.counts = {"prefill": 0, "decode": 1}
    with pytest.raises(ClusterError, match="old model serves on.*needs 3 CPUs, has 0; add nodes"):
        it.update.run()
    assert it.log == []


@pytest.mark.parametrize("cpus", [2, 4])
@pytest.mark.parametrize("unwanted", [True, False])
def test_a_model_that_does_not_load_leaves_the_old_one(
    monkeypatch: pytest.MonkeyPatch, cpus: int, unwanted: bool
) -> None:
    it = way(monkeypatch, cpus, fails_at=None if unwanted else 0)
    it.update.is_wanted = lambda: not (unwanted and it.log)
    with pytest.raises(ServeError, match="the old model serves on") as raised:
        it.update.run()
    assert ("has gone" if unwanted else "it does not load") in str(raised.value)
    assert it.log[-3:] == ["to [1]", "2: end", "1: 1+1"]
    assert not it.update.is_taken and "2: warm" not in it.log


def test_what_nobody_waits_for_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=2, is_wanted=lambda: False)
    with pytest.raises(ServeError, match="the old model serves on.* has gone"):
        it.update.run()
    assert it.log == [] and it.said == []


def test_whatever_goes_wrong_the_old_one_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=4)

    def failing(generation: int) -> None:
        raise RuntimeError("that nobody thought of")

    monkeypatch.setattr(it.update.routers, "warm_up", failing)
    with pytest.raises(ServeError, match="the old model serves on.* nobody thought of"):
        it.update.run()
    assert it.log == ["2: 1+1", "to [1]", "2: end", "1: 1+1"]


def broken(*_: object) -> None:
    raise ServeError("a router is gone")


def test_each_part_of_the_way_back_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=4)
    monkeypatch.setattr(it.update.routers, "lead", broken)
    with pytest.raises(ServeError) as raised:
        it.update.run()
    assert it.log == ["2: 1+1", "2: warm", "2: end", "1: 1+1"]
    text = "the old model is back, but not whole; not every router leads requests to it again (a r"
    assert str(raised.value).startswith(text)
    assert "serves on" not in str(raised.value) and not it.update.is_taken


def test_what_is_left_of_a_failed_way_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=4, fails_at=0)
    monkeypatch.setattr(it.update.new, "retire", broken)
    with pytest.raises(
        ServeError, match=r"^the old model serves on; .*ended \(a.*it does not load"
    ):
        it.update.run()
    assert it.log[-2:] == ["to [1]", "1: 1+1"]
    monkeypatch.setattr(it.update.old, "scale", broken)
    it.log.clear()
    with pytest.raises(ServeError, match=r"not whole; .*ended.*fewer workers.*it does not load"):
        it.update.run()
    assert it.log == ["2: 1+1", "to [1]"]


def test_once_the_old_one_has_ended_the_new_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=2, fails_at=1)
    with pytest.raises(ServeError, match="the new model serves, but with fewer workers: it does"):
        it.update.run()
    assert it.log == ONE_BY_ONE and it.update.is_taken


def test_from_no_worker_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=2)
    it.update.counts = {"prefill": 0, "decode": 0}
    it.update.run()
    assert it.log == BESIDE


def test_whoever_gives_up_after_requests_moved_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = way(monkeypatch, cpus=2)
    it.update.is_wanted = lambda: not it.update.is_taken
    it.update.run()
    assert it.log == ONE_BY_ONE


def test_a_signal_to_the_endpoint_undoes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    it = way(monkeypatch, cpus=4)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    it.update.pause = interrupted
    with pytest.raises(KeyboardInterrupt):
        it.update.run()
    assert it.log == ["2: 1+1"]  # all of it ends with the endpoint


def test_generations_have_the_ports_in_turn() -> None:
    it = config()
    site = Site(side_channel_ports(it, 20_000), True, (), "token")
    second = next_site(it, site, 20_000, 2)
    assert second.side_channel_ports == side_channel_ports(it, 20_000 + num_ports(it))
    assert next_site(it, second, 20_000, 3).side_channel_ports == site.side_channel_ports
    again = next_site(it, site, 20_000, 3)  # after one that was not taken
    assert again.side_channel_ports == second.side_channel_ports and again.generation == 3
