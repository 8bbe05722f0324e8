"""Plans: what may be written, and that the same plan always means the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.chaos_plan import Event, Plan
from ebbtide.platform.config import dump, parse
from ebbtide.platform.errors import ConfigError


def test_a_plan_is_read_from_a_file_and_written_back() -> None:
    text = """
seed: 7
replace_after_s: 10
events:
  - {at_step: 40, do: drain, deadline_s: 30}
  - {at_s: 12.5, do: kill, count: 2}
  - {at_s: 60, do: stop, target: worker, for_s: 20, node: n1}
  - {at_s: 90, do: add}
"""
    plan = parse(text, Plan)
    assert plan.events[0] == Event(at_step=40, do="drain", deadline_s=30)
    assert plan.events[2].node == "n1"
    assert plan.replace_after_s == 10


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ("do: kill, at_secs: 3", "at_secs is not a known key; did you mean at_s?"),
        ("do: explode, at_s: 3", "do: input should be"),
        ("do: kill", "do needs either at_step or at_s"),
        ("do: kill, at_s: 3, at_step: 3", "do needs either at_step or at_s"),
        ("do: kill, at_s: -1", "at_s: input should be greater"),
        ("do: kill, at_s: 3, for_s: 3", "for_s has no meaning for kill"),
        ("do: add, at_s: 3, node: n1", "node has no meaning for add"),
        ("do: drain, at_s: 3, target: worker", "target has no meaning for drain"),
        ("do: kill, at_s: 3, node: n1, count: 2", "node names one node"),
    ],
)
def test_what_has_no_meaning_is_refused(event: str, fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(f"events:\n  - {{{event}}}", Plan, "plan.yaml")
    assert fault in str(refused.value)
    assert "plan.yaml:2" in str(refused.value)


@given(st.integers(), st.floats(1, 1000), st.floats(1, 20_000), st.floats(1, 20_000))
def test_a_rate_is_a_function_of_its_seed_and_a_longer_plan_begins_alike(
    seed: int, per_hour: float, shorter_s: float, longer_s: float
) -> None:
    shorter_s, longer_s = sorted((shorter_s, longer_s))
    shorter = Plan.at_rate(per_hour, shorter_s, seed=seed)
    longer = Plan.at_rate(per_hour, longer_s, seed=seed)
    assert longer.events[: len(shorter.events)] == shorter.events
    assert Plan.at_rate(per_hour, shorter_s, seed=seed) == shorter
    moments = [event.at_s for event in longer.events if event.at_s is not None]
    assert moments == sorted(moments)
    assert all(moment < longer_s for moment in moments)


def test_a_rate_is_kept_on_average_and_its_kinds_are_mixed() -> None:
    plan = Plan.at_rate(30, 100 * 3600, seed=1)
    assert len(plan.events) == pytest.approx(3000, rel=0.1)
    kinds = [event.do for event in plan.events]
    assert kinds.count("drain") == pytest.approx(1800, rel=0.1)
    assert Plan.at_rate(30, 3600, seed=1, mix={"kill": 1}).events[0].do == "kill"
    assert parse(dump(plan), Plan) == plan


def test_regular_events_are_an_interval_apart() -> None:
    plan = Plan.every(15, 3)
    assert [(event.do, event.at_s) for event in plan.events] == [
        ("kill", 15),
        ("kill", 30),
        ("kill", 45),
    ]


@given(st.integers(), st.lists(st.integers(0, 50), unique=True), st.integers(1, 4))
def test_victims_are_drawn_among_the_usable_whatever_their_order(
    seed: int, numbers: list[int], count: int
) -> None:
    plan = Plan(seed=seed, events=(Event(do="kill", at_s=1, count=count),))
    usable = [f"n{number}" for number in numbers]
    victims = plan.victims(0, usable)
    assert victims == plan.victims(0, usable[::-1])
    assert set(victims) <= set(usable)
    assert len(set(victims)) == (count if count <= len(usable) else 0)


def test_a_named_node_is_taken_only_while_it_is_there() -> None:
    plan = Plan(events=(Event(do="kill", at_s=1, node="n2"),))
    assert plan.victims(0, ["n1", "n2"]) == ["n2"]
    assert plan.victims(0, ["n1"]) == []


def test_events_are_due_once_by_time_or_step() -> None:
    plan = Plan(events=(Event(do="add", at_s=10), Event(do="kill", at_step=5)))
    assert plan.due((), 9.9, None) == []
    assert plan.due((), 10.0, 4) == [0]
    assert plan.due((), 10.0, 5) == [0, 1]
    assert plan.due({0}, 99.0, 99) == [1]


def test_nodes_are_spared_for_the_run() -> None:
    plan = Plan(
        keep_nodes=2,
        events=(
            Event(do="kill", at_s=1, count=2),
            Event(do="kill", at_s=1, target="worker"),
            Event(do="add", at_s=1),
        ),
    )
    assert plan.spares_enough(0, 4)
    assert not plan.spares_enough(0, 3)
    assert plan.spares_enough(1, 2)
    assert not plan.spares_enough(1, 1)
    assert plan.spares_enough(2, 2)
