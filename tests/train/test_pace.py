"""What a run's events say of how long things take."""

from __future__ import annotations

from ebbtide.train.elastic import Running
from ebbtide.train.events import Checkpoint, Failed, GenerationBegan, Left
from ebbtide.train.pace import Pace
from tests.train.test_events import step

RUNNING = Running(("a", "b"), 0.0, has_left=False)


def began(time_s: float, attempt: int = 0) -> GenerationBegan:
    return GenerationBegan(time_s=time_s, attempt=attempt, world_size=1, nodes=("a",))


def test_nothing_is_known_at_first() -> None:
    found = Pace(100.0).measured(RUNNING, 130.0)
    assert (found.step_s, found.save_s, found.pause_s, found.losses) == (None, None, None, 0)
    assert (found.step, found.age_s, found.nodes) == (0, 30.0, ("a", "b"))


def test_steps_saves_and_pauses_are_told_apart() -> None:
    pace = Pace(0.0)
    for event in (
        began(10.0),
        step(1, time_s=15.0),  # the first of a generation takes longer
        step(2, time_s=16.0),
        Checkpoint(time_s=16.5, attempt=0, step=2, uri="", took_s=2.0),
        step(3, time_s=17.0),
        Left(time_s=20.0, attempt=0, step=3),
    ):
        pace.add(event)
    found = pace.measured(RUNNING, 20.0)
    assert (found.step, found.step_s, found.save_s, found.pause_s) == (3, 1.0, 2.0, None)
    for event in (began(24.0, 1), step(4, 1, time_s=27.0)):
        pace.add(event)
    found = pace.measured(RUNNING, 30.0)
    assert (found.step, found.step_s, found.pause_s, found.losses) == (4, None, 7.0, 0)
    pace.add(Failed(time_s=30.0, attempt=1, cause="node lost", message="", counted=False))
    assert pace.measured(RUNNING, 31.0).losses == 1
