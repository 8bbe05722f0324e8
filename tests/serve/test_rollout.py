"""One model's workers take the place of another's: never too many at once, and never none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.serve.config import Role
from ebbtide.serve.rollout import Counts, Fits, Step, steps


def room(number: int) -> Fits:
    """A cluster for so many workers, whatever their role."""
    return lambda old, new: sum(old.values()) + sum(new.values()) <= number


def of(prefill: int, decode: int) -> dict[Role, int]:
    return {"prefill": prefill, "decode": decode}


def test_with_room_for_both_all_of_the_new_start_before_any_of_the_old_ends() -> None:
    assert steps(of(1, 2), of(1, 2), room(6)) == [
        Step(of(1, 2), of(1, 2)),
        Step(of(0, 0), of(1, 2)),
    ]


def test_without_room_a_prefill_worker_gives_way_to_a_decode_worker() -> None:
    assert steps(of(1, 1), of(1, 1), room(2)) == [
        Step(of(0, 1), of(0, 0)),
        Step(of(0, 1), of(0, 1)),
        Step(of(0, 0), of(0, 1)),
        Step(of(0, 0), of(1, 1)),
    ]


def test_the_last_worker_gives_way_to_nobody() -> None:
    assert steps({"decode": 1}, {"decode": 1}, room(1)) is None
    assert steps(of(0, 0), of(1, 1), room(0)) is None


def test_from_nothing() -> None:
    assert steps(of(0, 0), of(1, 1), room(2)) == [Step(of(0, 0), of(1, 1))]


_COUNTS = st.builds(of, st.integers(0, 4), st.integers(1, 4))


@given(_COUNTS, _COUNTS, st.integers(1, 16))
def test_whatever_there_is_somebody_answers_and_nothing_is_overbooked(
    old: Counts, new: Counts, number: int
) -> None:
    fits = room(max(number, sum(old.values()), sum(new.values())))
    found = steps(old, new, fits)
    if found is None:
        assert sum(old.values()) == 1 == max(number, sum(new.values()))
        return
    before = Step(old, of(0, 0))
    for step in found:
        assert fits(step.old, step.new)
        started = any(step.new[role] > before.new[role] for role in step.new)
        ended = any(step.old[role] < before.old[role] for role in step.old)
        assert started != ended
        assert all(step.new[role] >= before.new[role] for role in step.new)
        assert all(step.old[role] <= before.old[role] for role in step.old)
        assert any(before.new.values()) or any(step.old.values())  # those that start are not ready
        before = step
    assert before == Step(of(0, 0), new)
