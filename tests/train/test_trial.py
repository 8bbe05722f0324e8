"""A run in this process alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ebbtide.platform.errors import ConfigError, NotFound, TrainingError
from ebbtide.train.preflight import check
from ebbtide.train.trial import Report, run_trial, single_process_group
from tests.train.conftest import MakeConfig


def test_a_trial_reports_validations_and_leaves_nothing_behind(make_config: MakeConfig) -> None:
    config = make_config(steps=5, validation={"every_steps": 2})
    reports: list[Report] = []
    last = run_trial(config, reports.append)
    assert [report["step"] for report in reports] == [2, 4, 5]
    assert last == reports[-1]
    assert last.keys() == {"step", "loss", "grad_norm", "lr", "tokens", "validation_loss"}
    assert not dist.is_initialized()
    assert not Path(config.storage).exists()
    again: list[Report] = []
    run_trial(config, again.append)
    assert again == reports  # bitwise


def test_with_checkpoints_it_goes_on_where_it_was(make_config: MakeConfig) -> None:
    class Stop(Exception):
        pass

    def stop(report: Report) -> None:
        raise Stop

    config = make_config(
        steps=4, validation={"every_steps": 2}, checkpoint={"every": 1, "keep_last": 1}
    )
    with pytest.raises(Stop):
        run_trial(config, stop, checkpoints=True)
    assert not dist.is_initialized()
    reports: list[Report] = []
    last = run_trial(config, reports.append, checkpoints=True)
    assert [report["step"] for report in reports] == [2, 4]
    finished = run_trial(config, reports.append, checkpoints=True)
    assert finished == {name: last[name] for name in ("step", "loss", "validation_loss")}
    assert len(reports) == 2


def test_a_rank_of_something_else_cannot_run_one(make_config: MakeConfig) -> None:
    alone = single_process_group(torch.device("cpu"))
    with alone, pytest.raises(TrainingError, match="process group already"):
        run_trial(make_config(), lambda report: None)


def test_a_job_is_checked_before_it_starts(make_config: MakeConfig, tmp_path: Path) -> None:
    check(make_config())
    with pytest.raises(ConfigError, match="sequence_length is 65"):
        check(make_config(data={"sequence_length": 65}))
    with pytest.raises(NotFound, match="no prepared dataset here"):
        check(make_config(data={"uri": str(tmp_path)}))
