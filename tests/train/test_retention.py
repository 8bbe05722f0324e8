"""What is kept, for any set of checkpoints."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.train.manifest import CheckpointInfo, State
from ebbtide.train.retention import surplus


def info(step: int, state: State = "complete", token: str = "aa") -> CheckpointInfo:
    return CheckpointInfo(step, f"runs/r/checkpoints/step-{step:08d}-{token}", state, 1, 0.0)


def test_the_newest_are_kept() -> None:
    found = [info(step) for step in (10, 8, 6, 4, 2)]
    assert surplus(found, found[0], keep_last=3) == [info(4), info(2)]
    assert surplus(found, found[0], keep_last=1) == found[1:]


def test_a_stale_higher_step_neither_counts_nor_goes() -> None:
    # Case C1: resumed from 9 with a stale step 50 present: the next save must survive.
    found = [info(50), info(60, "incomplete"), info(10, token="bb"), info(9)]
    assert surplus(found, info(10, token="bb"), keep_last=1) == [info(9)]


def test_broken_ones_go_when_a_newer_one_is_whole() -> None:
    found = [info(10, "incomplete", "bb"), info(10), info(9, "incomplete"), info(8, "corrupt")]
    assert surplus(found, info(10), 3) == [info(9, "incomplete"), info(8, "corrupt")]


STATES: list[State] = ["complete", "incomplete", "corrupt"]
INFOS = st.lists(
    st.builds(
        info, st.integers(0, 20), st.sampled_from(STATES), st.text("abcdef", min_size=2, max_size=2)
    ),
    unique_by=lambda i: i.name,
)


@given(INFOS, st.integers(0, 20), st.integers(1, 5))
def test_always(found: list[CheckpointInfo], step: int, keep_last: int) -> None:
    committed = info(step, token="0123")
    gone = surplus([*found, committed], committed, keep_last)
    assert committed not in gone
    assert all(one.step <= committed.step for one in gone)
    kept = [one for one in [*found, committed] if one not in gone and one.step <= step]
    complete = [one for one in kept if one.state == "complete"]
    past = sum(one.state == "complete" and one.step <= step for one in found) + 1
    assert len(complete) == min(keep_last, past)
    assert all(
        one.step <= other.step for one in gone if one.state == "complete" for other in complete
    )
