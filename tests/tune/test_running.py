"""What a trial's reports must be, and how its process's death is told."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ebbtide.tune.running import TrialFailed, check_metrics, death_reason


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"loss": 1.0}, "reports no validation_loss; it reports loss"),
        ({}, "it reports nothing"),
        ({"validation_loss": float("nan")}, "is nan"),
        ({"validation_loss": float("-inf")}, "is -inf"),
        ({"validation_loss": "low"}, "not a number"),
        ({"validation_loss": True}, "not a number"),
    ],
)
def test_a_metric_must_be_a_finite_number(metrics: dict[str, Any], told: str) -> None:
    with pytest.raises(TrialFailed, match=told):
        check_metrics(metrics, "validation_loss")


def test_reasons_of_death() -> None:
    assert "exit code 0" in death_reason(0)
    assert "SIGSEGV" in death_reason(-11)
    assert "signal 63" in death_reason(-63)
    assert "zygote" in death_reason(None)


def test_a_failure_survives_pickling() -> None:
    failure = pickle.loads(pickle.dumps(TrialFailed("why", True, "trace", True)))
    assert (str(failure), failure.may_retry, failure.details, failure.evicted) == (
        "why",
        True,
        "trace",
        True,
    )
