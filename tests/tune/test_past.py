"""What is told again of a killed driver's sweep, without Ray."""

from __future__ import annotations

from typing import Any

from ebbtide.tune.past import Past, with_memories
from ebbtide.tune.running import Memory, TrialFailed


def started(trial: int, seed: int) -> dict[str, Any]:
    return {"event": "started", "trial": trial, "values": {"seed": seed}, "at_s": float(trial)}


def reported(trial: int, loss: float, finished: bool = False) -> dict[str, Any]:
    metrics = {"loss": loss}
    return {
        "event": "reported",
        "trial": trial,
        "metrics": metrics,
        "finished": finished,
        "seconds": 1.0,
        "at_s": 9.0,
    }


def failed(trial: int, may_retry: bool) -> dict[str, Any]:
    return {
        "event": "failed",
        "trial": trial,
        "reason": "killed",
        "may_retry": may_retry,
        "details": "",
        "evicted": False,
        "at_s": 9.0,
    }


EVENTS = [
    {"event": "attempt", "at_s": 0.0},
    started(1, 11),
    started(2, 22),
    reported(2, 0.5),
    failed(1, may_retry=True),
    reported(2, 0.4, finished=True),
    reported(1, 0.9),
    started(3, 11),
]


def test_each_trial_is_told_its_own_in_the_order_of_then() -> None:
    past = Past(EVENTS)
    assert past.num_finished == 1
    assert past.claim("b", {"seed": 22}) == 2  # by its values, not by its turn
    assert past.due() == "b"
    assert past.claim("a", {"seed": 11}) == 1
    assert past.claim("c", {"seed": 11}) == 3
    assert past.claim("new", {"seed": 99}) == 4
    assert past.claim("a", {"seed": 11}) == 1
    assert [past.has_answer(name) for name in ("a", "b", "c", "new")] == [True, True, False, False]
    assert past.to_skip("b") == 2
    told = []
    while not past.is_over():
        trial_id = past.due()
        assert trial_id is not None
        told.append((trial_id, past.answer(trial_id)))
        with past.telling(trial_id):
            assert past.is_telling
    assert [name for name, _ in told] == ["b", "a", "b", "a"]
    assert isinstance(told[1][1], TrialFailed) and told[1][1].may_retry
    again = told[3][1]
    assert isinstance(again, dict) and (again["loss"], again["training_iteration"]) == (0.9, 1)
    assert not past.has_answer("a") and not past.is_telling


def test_the_results_of_an_unfinished_try_are_skipped_and_those_before_a_failure_not() -> None:
    past = Past([started(1, 11), reported(1, 1.0), failed(1, True), reported(1, 1.0)])
    past.claim("a", {"seed": 11})
    assert past.to_skip("a") == 0  # the try that failed is told to its end
    past.answer("a"), past.answer("a")
    assert past.to_skip("a") == 1


def test_a_sweep_that_goes_another_way_is_told_what_fits() -> None:
    past = Past(EVENTS)
    past.claim("b", {"seed": 22})
    with past.telling("b"):
        past.answer("b")
    assert past.due() is None
    assert past.earliest(["b"]) == "b"
    with past.telling("b"):
        past.answer("b")
    assert past.earliest([]) is None and past.is_over() and past.due() is None
    past.claim("late", {"seed": 11})  # is still told, and not run
    assert past.has_answer("late") and past.earliest(["late"]) == "late"
    with past.telling("late"):
        assert past.is_telling


def test_evaluators_remember_what_a_killed_driver_did_not_write() -> None:
    def memory(number: int, seed: int, **more: Any) -> Memory:
        results = [
            {"loss": loss, "finished": loss < 0.3, "done": False, "pid": 7, "time_total_s": at_s}
            for loss, at_s in ((0.9, 1.0), (0.2, 2.0))
        ]
        found = Memory("key", number, {"seed": seed}, 0, 0, 20.0, results)
        for name, value in more.items():
            setattr(found, name, value)
        return found

    lost = memory(7, 77)
    half = memory(1, 11, failures=1, skipped=0)
    stale = memory(2, 12345)  # another trial by this number
    broken = memory(3, 11, results=[], failure={**failed(3, False), "reason": "ValueError"})
    assert broken.failure is not None
    del broken.failure["event"], broken.failure["trial"]
    events = with_memories(EVENTS, [lost, half, stale, broken])
    assert events[: len(EVENTS)] == EVENTS
    new = [(event["event"], event["trial"]) for event in events[len(EVENTS) :]]
    assert sorted(new) == [
        ("failed", 3),
        ("reported", 1),
        ("reported", 7),
        ("reported", 7),
        ("started", 7),
    ]
    past = Past(events)
    assert past.num_finished == 4
    assert past.claim("x", {"seed": 77}) == 7
    assert [past.answer("x")["loss"] for _ in range(2)] == [0.9, 0.2]  # type: ignore[index]
