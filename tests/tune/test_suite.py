"""Suites: what a file may say, and how checkpoints are ranked."""

from __future__ import annotations

import pytest

from ebbtide.platform.config import parse
from ebbtide.platform.errors import ConfigError
from ebbtide.tune.results import Trial
from ebbtide.tune.suite import Suite, ranked


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tasks: {}", "at least 1"),
        ("tasks: {a: {scorer: nowhere}}", "scorer"),
        ("tasks: {a: {scorer: 'm:f', data: d}}", "remove data"),
        ("tasks: {a: {options: {n: 1}}}", "set scorer"),
        ("tasks: {step: {}}", "name no task step"),
        ("tasks: {a: {splti: train}}", "split"),
    ],
)
def test_what_is_wrong_is_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(text, Suite, "suite.yaml")


def trial(checkpoint: str, task: str, metric: float | None) -> Trial:
    values = {"checkpoint": checkpoint, "task": task}
    if metric is None:
        return Trial(1, "id", values, "failed", reason="why")
    return Trial(1, "id", values, "finished", metric, reports=[{"step": 3.0, "score": metric}])


@pytest.mark.parametrize(("mode", "order"), [("min", "bac"), ("max", "abc")])
def test_the_first_task_ranks_and_what_lacks_it_comes_last(mode: str, order: str) -> None:
    suite = Suite.model_validate({"tasks": {"first": {"mode": mode}, "second": {}}})
    scores = {"a": (2.0, 1.0), "b": (1.0, None), "c": (None, 1.0)}
    trials = [
        trial(checkpoint, task, metric)
        for checkpoint, metrics in scores.items()
        for task, metric in zip(suite.tasks, metrics, strict=True)
    ]
    found = ranked(suite, trials, "checkpoint", "task", {"d": "not there"})
    assert "".join(each.checkpoint for each in found) == f"{order}d"
    assert found[-1].reasons == dict.fromkeys(suite.tasks, "not there")
    assert found[-2].row(suite.tasks) == {
        "checkpoint": "c",
        "step": 3.0,
        "first": None,
        "second": 1.0,
        "seconds": 0.0,
        "reason": "first: why",
    }
