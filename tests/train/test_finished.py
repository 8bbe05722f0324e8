"""A run that is finished says so only to the job that made it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ebbtide.platform.errors import CheckpointError
from ebbtide.train.job import train
from tests.train.conftest import MakeConfig
from tests.train.ranks import Ranks
from tests.train.ranks import train as run_ranks


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"batch": {"global_sequences": 16, "micro_sequences": 2}},
        {"data": {"sequence_length": 16}},
    ],
)
def test_another_job_under_its_name_is_refused(
    ranks: Ranks, make_config: MakeConfig, change: dict[str, Any]
) -> None:
    ranks.run(1, run_ranks, make_config(steps=2))
    assert train(make_config(steps=2)).was_finished
    with pytest.raises(CheckpointError, match="is of a run over other samples"):
        train(make_config(steps=2, **change))


def test_its_data_may_be_gone(ranks: Ranks, make_config: MakeConfig, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(make_config().data.uri, data)
    config = make_config(steps=2, data={"uri": str(data)})
    ranks.run(1, run_ranks, config)
    shutil.rmtree(data)
    assert train(config).was_finished
