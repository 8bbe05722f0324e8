"""The elastic rules, and a run on a real cluster through notice, kill and growth."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.account import account
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.ledger import read_ledger
from ebbtide.platform.local_cluster import LocalCluster, NodeHandle
from ebbtide.platform.meter import Meter, Owner
from ebbtide.train import elastic
from ebbtide.train.config import TrainConfig
from ebbtide.train.driver import Progress
from ebbtide.train.elastic import (
    GROWTH_GAIN,
    GROWTH_INTERVAL_S,
    GROWTH_STABLE_S,
    NOTICE_WINDOW_S,
    Limits,
    Offer,
    Running,
)
from ebbtide.train.events import (
    Event,
    Failed,
    GenerationBegan,
    NodeLost,
    Notice,
    StateDigest,
    read_events,
)
from ebbtide.train.history import History
from ebbtide.train.job import train
from ebbtide.train.loop import run_generation
from ebbtide.train.manifest import CheckpointInfo
from ebbtide.train.saver import Missed
from ebbtide.train.step import StepResult
from ebbtide.train.surroundings import samples_digest
from ebbtide.train.trial import single_process_group
from tests.train.conftest import MakeConfig

LIMITS = Limits(1, 4)


def running(*nodes: str, began_s: float = 0.0) -> Running:
    return Running(nodes, began_s, has_left=False)


OFFERS = st.lists(
    st.builds(
        Offer,
        node_id=st.sampled_from("abcdefgh"),
        workers=st.integers(0, 4),
        draining=st.booleans(),
        reachable=st.booleans(),
        warm=st.booleans(),
    ),
    unique_by=lambda offer: offer.node_id,
)


@given(OFFERS, st.integers(1, 5), st.integers(0, 5))
def test_a_start_is_within_the_limits_and_what_is_usable(
    offers: list[Offer], fewest: int, more: int
) -> None:
    limits = Limits(fewest, fewest + more)
    usable = sum(each.workers for each in offers if each.reachable and not each.draining)
    start = elastic.workers_to_start(offers, limits)
    if start is None:
        assert usable < fewest
    else:
        assert fewest <= start <= min(usable, limits.most)
        assert start == min(usable, limits.most)


@given(OFFERS, st.sets(st.sampled_from("abcdefgh")), st.integers(1, 9))
def test_ranks_are_placed_where_the_run_was_first(
    offers: list[Offer], before: set[str], workers: int
) -> None:
    room = {each.node_id: each.workers for each in offers if each.usable and each.workers}
    chosen = elastic.place(offers, before, workers)
    if not chosen:
        assert sum(room.values()) < workers
        return
    assert len(chosen) == workers
    assert all(ranks <= room[node] for node, ranks in Counter(chosen).items())
    fewer = list(dict.fromkeys(chosen))[:-1]
    assert sum(room[node] for node in fewer) < workers
    if set(chosen) - before:  # strangers only when the known ones do not do
        assert room.keys() & before <= set(chosen)


@given(OFFERS, st.sets(st.sampled_from("abcdefgh")), st.integers(1, 4))
def test_a_restart_waits_for_no_cold_node_that_it_can_do_without(
    offers: list[Offer], before: set[str], fewest: int
) -> None:
    limits = Limits(fewest, 8)
    chosen = elastic.offers_to_start(offers, before, limits)
    cold = [each for each in chosen if each.node_id not in before and not each.warm]
    ready = elastic.ready_offers(offers, before)
    assert not cold or elastic.workers_to_start(ready, limits) is None
    assert (elastic.workers_to_start(chosen, limits) is None) == (
        elastic.workers_to_start(offers, limits) is None
    )


SAVES = replace(running("a", "b"), step_s=0.5, save_s=1.0, step=50, age_s=600.0)


def test_only_nodes_of_the_generation_are_noticed() -> None:
    offers = [Offer("c", 1, draining=True), Offer("b", 1, draining=True, deadline_s=9.0)]
    assert elastic.noticed([*offers, Offer("a", 1)], SAVES) == {"b": 9.0}


@pytest.mark.parametrize(
    ("deadline_s", "first_seen_s", "is_due"),
    [
        (None, 100.0, True),  # nobody knows how long there is
        (220.0, 99.0, False),  # others may come
        (220.0, 95.0, True),  # the window is over
        (107.9, 100.0, True),  # no time to wait: window, save and step do not fit twice
        (108.1, 100.0, False),
    ],
)
def test_a_notice_is_followed_after_a_window_or_at_once(
    deadline_s: float | None, first_seen_s: float, is_due: bool
) -> None:
    assert elastic.notice_is_due({"b": deadline_s}, SAVES, 100.0, first_seen_s) == is_due


@given(st.floats(0, 300), st.floats(0.1, 20), st.floats(0.01, 20))
def test_with_time_enough_a_window_never_costs_the_save(
    left_s: float, save_s: float, step_s: float
) -> None:
    generation = replace(SAVES, save_s=save_s, step_s=step_s)
    going = {"b": left_s}
    waits = not elastic.notice_is_due(going, generation, NOTICE_WINDOW_S - 0.001, 0.0)
    assert not (waits and elastic.too_late(going, generation, NOTICE_WINDOW_S + 0.5 * save_s))


def test_a_deadline_that_leaves_no_time_for_a_save_is_too_late() -> None:
    going = {"a": 101.4, "b": 101.6, "c": None}
    assert elastic.too_late(going, SAVES, 100.0) == ["a"]
    assert elastic.too_late(going, running("a"), 100.0) == ["a", "b"]  # a save takes 2 s, who knows


@given(st.floats(0, 60), st.floats(0, 60), st.booleans())
def test_growth_waits_until_no_more_is_to_come_and_the_generation_not_young(
    age_s: float, since_s: float, is_most: bool
) -> None:
    due = elastic.growth_is_due(running("a"), age_s, age_s - since_s, is_most=is_most)
    has_waited = is_most or age_s - (age_s - since_s) >= GROWTH_STABLE_S
    assert due == (age_s >= GROWTH_INTERVAL_S and has_waited)
    assert not elastic.growth_is_due(running("a"), age_s, None, is_most=is_most)


def test_growth_is_worth_its_pause_or_not() -> None:
    limits = Limits(1, 4, micro_batches=8, steps=10_000)
    generation = replace(SAVES, pause_s=10.0)
    assert elastic.growth_gain(generation, 4, limits) == pytest.approx((1 - 10 / 2400) * 2)
    assert elastic.growth_gain(generation, 3, limits) == pytest.approx((1 - 10 / 2400) * 4 / 3)
    # a run that loses a worker every half minute, one near its end, rounds that stay as they are
    assert elastic.growth_gain(replace(generation, losses=120), 3, limits) < GROWTH_GAIN
    assert elastic.growth_gain(generation, 3, replace(limits, steps=70)) == 0.0
    assert elastic.growth_gain(generation, 3, replace(limits, micro_batches=2)) < 1
    assert elastic.growth_gain(running("a"), 2, limits) == math.inf


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 100), st.integers(0, 50))
def test_a_longer_pause_or_more_losses_never_make_growth_better(
    now: int, more: int, pause_s: float, losses: int
) -> None:
    limits = Limits(1, 12, micro_batches=12, steps=1000)
    generation = replace(running(*"abcdef"[:now]), step_s=1.0, pause_s=pause_s, losses=losses)
    gain = elastic.growth_gain(generation, now + more, limits)
    assert elastic.growth_gain(replace(generation, pause_s=pause_s + 5), now + more, limits) <= gain
    assert elastic.growth_gain(replace(generation, losses=losses + 1), now + more, limits) <= gain


def test_nodes_that_must_not_be_used_are_asked_for_again() -> None:
    offers = [Offer("a", 2), Offer("b", 2, draining=True), Offer("c", 1, reachable=False)]
    assert elastic.hidden_workers(offers) == 3


class Recorder:
    """Surroundings without a world that keep every step."""

    def __init__(self) -> None:
        self.meter = Meter(SystemClock())
        self.steps: list[StepResult] = []
        self.validation: dict[int, float] = {}

    def should_leave(self, step: int) -> str | None:
        return None

    def on_step(self, result: StepResult) -> None:
        self.steps.append(result)

    def on_validation(self, step: int, loss: float) -> None:
        self.validation[step] = loss

    def on_checkpoint(self, info: CheckpointInfo, took_s: float) -> None:
        return None

    def on_missed(self, missed: Missed) -> None:
        return None

    def last_events(self, step: int) -> bytes:
        return b""


def undisturbed(config: TrainConfig) -> Recorder:
    """The same job on one rank, in this process."""
    recorder, device = Recorder(), torch.device("cpu")
    with single_process_group(device):
        run_generation(config, 0, recorder, device, checkpoints=False)
    return recorder


class Weather:
    """Announces the end of rank 0's node, kills one, adds one and kills two at once."""

    def __init__(self, cluster: LocalCluster, run_uri: str) -> None:
        self._cluster, self._run_uri = cluster, run_uri
        self.drained: list[str] = []
        self.killed: list[str] = []
        self.acts: list[tuple[int, Callable[[], object]]] = [
            (0, self._drain),
            (1, lambda: self._kill(1)),
            (2, threading.Thread(target=cluster.add_node).start),
            (3, lambda: self._kill(1, 2)),
        ]
        self.times_s: list[float] = []
        self._since: tuple[int, int] = (-1, 0)

    def _drain(self) -> None:
        first = self._ranks()[0]
        self.drained.append(first.node_id)
        self._cluster.drain(first, 15.0)

    def _kill(self, *ranks: int) -> None:
        nodes = self._ranks()
        victims = [nodes[rank] for rank in ranks]
        self.killed += [node.node_id for node in victims]
        with ThreadPoolExecutor(len(victims)) as pool:
            list(pool.map(self._cluster.kill, victims))

    def _ranks(self) -> list[NodeHandle]:
        """The nodes of the newest generation's ranks."""
        began = [e for e in read_events(self._run_uri) if isinstance(e, GenerationBegan)]
        handles = {node.node_id: node for node in self._cluster.nodes}
        return [handles[node_id] for node_id in began[-1].nodes]

    def __call__(self, progress: Progress) -> None:
        if progress.attempt != self._since[0]:
            self._since = (progress.attempt, progress.step)
        if len(self.times_s) < len(self.acts):
            attempt, act = self.acts[len(self.times_s)]
            if progress.attempt == attempt and progress.step >= self._since[1] + 12:
                self.times_s.append(time.time())
                act()


@pytest.mark.ray
@pytest.mark.slow
def test_an_evicted_killed_and_grown_run_is_the_same_run(
    cluster: LocalCluster, make_config: MakeConfig, tmp_path: Path
) -> None:
    job = {
        "steps": 145,
        "batch": {"global_sequences": 24, "micro_sequences": 2},
        "checkpoint": {"every": 10},
        "digest": True,
        "validation": {"every_steps": 40},
        "workers": {"min": 1, "max": 4},
    }
    config = make_config(**job, model={"loss": "tests.train.user_code:slow_loss"})
    weather = Weather(cluster, config.run_uri)
    result = train(config, address=cluster.address, on_progress=weather)
    _expect_no_ranks(cluster)
    events = read_events(config.run_uri)
    history = History(events)

    assert history.world_sizes == [4, 3, 2, 3, 1]
    assert [each.ended for each in history.attempts] == [
        "notice",
        "failure",
        "growth",
        "failure",
        None,
    ]
    lost_steps = [each.steps_lost for each in history.attempts]
    assert lost_steps[0] == lost_steps[2] == 0
    assert lost_steps[1] <= 2  # copies are made of every second step at least
    assert lost_steps[3] <= 15  # no node has a whole copy: back to a checkpoint
    assert result.attempts == 5
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(each.cause, each.counted) for each in failed] == [("node lost", False)] * 2
    assert [event.node for event in events if isinstance(event, Notice)] == weather.drained
    lost = {event.node: event.announced for event in events if isinstance(event, NodeLost)}
    assert lost == dict.fromkeys(weather.drained, True) | dict.fromkeys(weather.killed, False)

    expected = undisturbed(make_config(**job))
    assert sorted(history.kept) == [step.step for step in expected.steps]
    for step in expected.steps:
        kept = history.kept[step.step]
        assert (kept.loss, kept.grad_norm) == (step.loss, step.grad_norm)
        assert (kept.lr, kept.tokens) == (step.lr, step.tokens)
        assert step.sample_ids is not None
        assert kept.samples == samples_digest(step.sample_ids)
    assert history.validation_loss == expected.validation[145]
    digests = [event for event in events if isinstance(event, StateDigest)]
    assert digests[-1].tensors == expected.steps[-1].digests

    _expect_an_honest_ledger(config)
    recovery_s = {
        name: _first_step_after(events, at_s, attempt) - at_s
        for (name, attempt), at_s in zip(
            (("notice", 1), ("kill", 2), ("growth", 3), ("kill of two", 4)),
            weather.times_s,
            strict=True,
        )
    }
    print("to the next step:", {name: round(took_s, 1) for name, took_s in recovery_s.items()})
    assert recovery_s["kill"] < 50
    assert recovery_s["notice"] < 50


def _first_step_after(events: list[Event], at_s: float, attempt: int) -> float:
    return min(
        event.time_s
        for event in events
        if event.kind == "step" and event.attempt == attempt and event.time_s > at_s
    )


def _expect_an_honest_ledger(config: TrainConfig) -> None:
    result = account(read_ledger(config.run_uri).records, time.time())
    assert result.status == "finished"
    assert len({row.node.node_id for row in result.rows}) == 5
    assert sum(part.time_us for part in result.by_owner.values()) == result.total.time_us
    assert {number for number in result.by_attempt if number is not None} == {0, 1, 2, 3, 4}
    assert result.by_owner[Owner.COMPUTE].time_us > 0
    assert result.by_owner[Owner.RESTART].time_us > 0
    assert not result.total.spent.partial


def _expect_no_ranks(cluster: LocalCluster) -> None:
    """Within seconds no process of a rank is left on any node."""
    deadline_s = time.monotonic() + 30
    while left := [name for name in cluster.process_names() if "RayTrainWorker" in name]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)
