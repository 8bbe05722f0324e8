"""Scores of checkpoints and exports, in this process; on the pool in test_job.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.platform.errors import CheckpointError, ConfigError
from ebbtide.platform.storage import open_storage
from ebbtide.train.export import export
from ebbtide.train.manifest import list_checkpoints
from ebbtide.train.trial import Report, run_trial
from ebbtide.tune.evaluate import evaluate, score
from ebbtide.tune.trial import Context, Metrics
from tests.train.conftest import MakeConfig


def scored(uri: str, base: object = None) -> Metrics:
    return score({"checkpoint": uri, "base": base}, Context(1, lambda metrics: None))


def test_a_checkpoint_scores_what_its_run_has_logged(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(
        steps=4, validation={"every_steps": 2}, checkpoint={"every": 2, "keep_last": 2}
    )
    reports: list[Report] = []
    run_trial(config, reports.append, checkpoints=True)
    run = f"{config.storage}/{config.name}"
    found = {info.step: info.uri for info in list_checkpoints(open_storage(run))}
    for report in reports:
        score_of = scored(found[int(report["step"])])
        assert score_of == {
            "step": report["step"],
            "validation_loss": report["validation_loss"],
            "sequences": 7,
        }
    assert scored(run) == scored(found[4])

    base = config.model_copy(
        update={"validation": config.validation.model_copy(update={"sequences": 3})}
    ).model_dump(mode="json")
    out = str(tmp_path / "export")
    export(run, out)
    with pytest.raises(ConfigError, match="give --base"):
        scored(out)
    assert scored(out, base) == scored(run, base)
    assert scored(run, base)["sequences"] == 3 and scored(run, base) != scored(run)


def test_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        scored(str(tmp_path))
    with pytest.raises(ConfigError, match="is given twice"):
        evaluate(["a", "b", "a"])
