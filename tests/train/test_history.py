"""What events add up to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.train.events import (
    Event,
    Failed,
    GenerationBegan,
    LeaveAsked,
    Left,
    Started,
    Step,
)
from ebbtide.train.history import History
from ebbtide.train.rhythm import Interruptions


def began(attempt: int, world_size: int = 2) -> GenerationBegan:
    nodes = tuple(f"n{number}" for number in range(world_size))
    return GenerationBegan(time_s=0, attempt=attempt, world_size=world_size, nodes=nodes)


def step(number: int, attempt: int, time_s: float = 0.0) -> Step:
    return Step(
        time_s=time_s,
        attempt=attempt,
        step=number,
        loss=float(number),
        grad_norm=1.0,
        lr=1e-3,
        tokens=100,
        epoch=0,
        samples="",
        seconds={},
    )


def steps(attempt: int, first: int, last: int) -> list[Event]:
    return [step(number, attempt) for number in range(first, last + 1)]


def test_an_undisturbed_run_loses_nothing() -> None:
    history = History([Started(time_s=0, steps=5), began(0), *steps(0, 1, 5)])
    assert history.world_sizes == [2]
    assert sorted(history.kept) == [1, 2, 3, 4, 5]
    assert history.steps_lost() == 0
    assert history.next_attempt == 1


def test_lost_steps_belong_to_the_attempt_that_made_them_and_how_it_ended() -> None:
    history = History(
        [
            Started(time_s=0, steps=9),
            began(0, 4),
            *steps(0, 1, 5),
            LeaveAsked(time_s=0, attempt=0, reason="notice: n1 will be taken away"),
            Left(time_s=0, attempt=0, step=5),
            began(1, 3),
            *steps(1, 6, 8),
            Failed(time_s=0, attempt=1, cause="node lost", message="", counted=False),
            began(2, 2),
            *steps(2, 7, 9),
        ]
    )
    assert [each.ended for each in history.attempts] == ["notice", "failure", None]
    assert [each.steps_lost for each in history.attempts] == [0, 2, 0]
    assert history.steps_lost("notice") == 0
    assert history.steps_lost("failure") == 2
    assert [history.kept[number].attempt for number in (5, 6, 7, 9)] == [0, 1, 2, 2]
    assert history.attempts[1].first_step == 6
    assert history.attempts[1].last_step == 8


def test_growth_is_told_from_notice() -> None:
    history = History(
        [
            began(0),
            step(1, 0),
            LeaveAsked(time_s=0, attempt=0, reason="growth: 3 workers are possible, 2 run"),
            Left(time_s=0, attempt=0, step=1),
        ]
    )
    assert history.attempts[0].ended == "growth"


def test_a_new_driver_ends_what_the_one_before_left_open() -> None:
    history = History(
        [Started(time_s=0, steps=9), began(0), step(1, 0), Started(time_s=9, steps=9), began(1)]
    )
    assert history.sessions == 2
    assert history.attempts[0].ended == "driver"


def test_tokens_per_second_are_of_the_newest_attempt() -> None:
    history = History([began(0), step(1, 0, 0.0), step(2, 0, 1.0)])
    assert history.tokens_per_s == 100.0
    history.add([began(1), step(3, 1, 50.0)])
    assert history.tokens_per_s is None
    history.add([began(2)])
    assert history.last is not None and history.last.step == 3
    history.add([began(1), step(3, 1, 50.0)])
    history.add([step(4, 1, 50.5)])
    assert history.tokens_per_s == 200.0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=8))
def test_made_steps_are_either_kept_or_lost(attempts: list[tuple[int, int]]) -> None:
    """Each attempt makes some steps and loses some of them."""
    events: list[Event] = []
    saved = made = 0
    for number, (count, lost) in enumerate(attempts):
        events += [began(number), *steps(number, saved + 1, saved + count)]
        made += count
        saved += max(0, count - lost)
    events += [began(len(attempts)), step(saved + 1, len(attempts))]
    history = History(events)
    assert made + 1 == len(history.kept) + history.steps_lost()
    assert sorted(history.kept) == list(range(1, saved + 2))


def test_interruptions_are_counted_over_the_time_that_the_run_was_up() -> None:
    def at(time_s: float, event: Event) -> Event:
        return event.model_copy(update={"time_s": time_s})

    history = History(
        [
            Started(time_s=0, steps=9),
            at(10, began(0)),
            step(1, 0, 20.0),
            Failed(time_s=30, attempt=0, cause="killed", message="", counted=False),
            at(40, began(1)),
            LeaveAsked(time_s=50, attempt=1, reason="growth: more"),
            Left(time_s=60, attempt=1, step=1),
            at(70, began(2)),
            step(2, 2, 80.0),
            Started(time_s=10_000, steps=9),  # the driver was gone for long
            at(10_010, began(3)),
        ]
    )
    assert history.interruptions == Interruptions(1, 90.0)
