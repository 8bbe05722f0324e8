"""The best of a sweep, and its document."""

from __future__ import annotations

import json
import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.tune.results import SweepResult, Trial, best


def trial(number: int, metric: float | None, status: str = "finished") -> Trial:
    found = Trial(number, f"id-{number}", {"optimizer.lr": 0.1 * number})
    found.metric = metric
    found.status = status  # type: ignore[assignment]  # text for a literal
    return found


@pytest.mark.parametrize(("mode", "wanted"), [("min", 5), ("max", 4)])
def test_failed_trials_are_never_the_best(mode: Literal["min", "max"], wanted: int) -> None:
    trials = [
        trial(1, None, "failed"),
        trial(2, math.nan),
        trial(3, math.inf if mode == "max" else -math.inf),
        trial(4, 0.3),
        trial(5, 0.2),
        trial(6, -1.0 if mode == "min" else 9.0, "failed"),
    ]
    found = best(trials, mode)
    assert found is not None and found.number == wanted


def test_without_a_usable_trial_there_is_no_best() -> None:
    assert best([trial(1, None, "failed"), trial(2, math.nan)], "min") is None
    assert best([], "max") is None


@given(st.lists(st.floats(allow_nan=True), min_size=1), st.sampled_from(["min", "max"]))
def test_the_best_is_finite_and_nothing_is_better(
    metrics: list[float], mode: Literal["min", "max"]
) -> None:
    found = best([trial(i, metric) for i, metric in enumerate(metrics)], mode)
    finite = [metric for metric in metrics if math.isfinite(metric)]
    if found is None:
        assert not finite
    else:
        wanted = min(finite) if mode == "min" else max(finite)
        assert found.metric == wanted
        assert found.number == metrics.index(wanted)


def test_the_document_is_json_even_with_numbers_that_are_not_finite() -> None:
    diverged = trial(1, None, "failed")
    diverged.reports = [{"step": 1, "loss": math.inf}]
    result = SweepResult(
        name="s",
        uri="u",
        metric="loss",
        mode="min",
        status="finished",
        trials=(diverged, trial(2, 0.5)),
        seconds=1.0,
        first_trial_s=0.1,
    )
    document = json.loads(json.dumps(result.document(), allow_nan=False))
    assert document["best"] == {"number": 2, "optimizer.lr": 0.2}
    assert document["best_metric"] == 0.5 and document["failed"] == 1
