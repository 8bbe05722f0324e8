"""Scores of checkpoints and exports, in this process; on the pool in test_job.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from torch import nn

from ebbtide.platform.errors import CheckpointError, ConfigError, TuneError
from ebbtide.platform.storage import open_storage
from ebbtide.train.checkpoint import read_model_state
from ebbtide.train.config import TrainConfig
from ebbtide.train.export import export
from ebbtide.train.manifest import list_checkpoints
from ebbtide.train.trial import Report, run_trial
from ebbtide.tune.evaluate import evaluate
from ebbtide.tune.scoring import score
from ebbtide.tune.trial import Context, Metrics, Reporter
from tests.train.conftest import MakeConfig


def scored(uri: str, base: object = None, **task: object) -> Metrics:
    config = {"checkpoint": uri, "base": base, "task": "one", "tasks": {"one": task}}
    return score(config, Context(1, Reporter(None, None)))


def parameters(model: nn.Module, job: TrainConfig, times: int = 1) -> float:
    """A scorer."""
    assert not model.training and job.name
    return float(times * sum(each.numel() for each in model.parameters()))


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
            "score": report["validation_loss"],
            "sequences": 7,
        }
    assert scored(run) == scored(found[4])

    data = str(tmp_path / "data")
    shutil.copytree(config.data.uri, data)
    assert scored(run, data=data, sequences=7) == scored(run)
    assert scored(run, split="train")["score"] != scored(run)["score"]
    scorer = {"scorer": f"{__name__}:parameters", "options": {"times": 2}}
    count = sum(t.numel() for t in read_model_state(run)[1].values())
    assert scored(run, **scorer) == {"step": 4, "score": 2.0 * count}

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
    for same in ("a/", "./a", f"file://{os.path.abspath('a')}"):
        with pytest.raises(ConfigError, match=r"is given twice, as a, too"):
            evaluate(["a", "b", same])
    with pytest.raises(ConfigError, match="is given twice"):
        evaluate(["s3://bucket/a", "s3://bucket/a/"])


def test_nothing_is_started_where_there_is_nothing_to_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebbtide.tune.job.run_sweep", None)
    (tmp_path / "ebbtide.json").write_text("{}")
    with pytest.raises(TuneError, match="nothing can be scored: .*is no complete .*is damaged"):
        evaluate([str(tmp_path / "missing"), str(tmp_path)])


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_newest(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(steps=2, checkpoint={"every": 1, "keep_last": 2})
    run_trial(config, lambda report: None, checkpoints=True)
    last, first = list_checkpoints(open_storage(config.run_uri))
    newest = [first, last]
    monkeypatch.setattr("ebbtide.train.stored.newest", lambda run: newest[0])

    def read(uri: str) -> object:
        if newest[0] is first:  # by now the run has committed the last one
            newest.pop(0)
            shutil.rmtree(first.uri)
        return read_model_state(uri)

    monkeypatch.setattr("ebbtide.train.checkpoint.read_model_state", read)
    assert scored(config.run_uri)["step"] == last.step == 2
