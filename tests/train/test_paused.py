"""The job of a paused run, out of its newest checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ebbtide.platform.errors import CheckpointError, ConfigError
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import list_checkpoints
from ebbtide.train.paused import paused_job, run_of
from tests.train.conftest import MakeConfig
from tests.train.test_elastic import Recorder


@pytest.fixture
def job(make_config: MakeConfig, tmp_path: Path) -> TrainConfig:
    """A run that has finished two steps and saved after each; its model's file is its own."""
    import torch

    from ebbtide.train.loop import run_generation
    from ebbtide.train.trial import single_process_group

    model = tmp_path / "model.json"
    shutil.copy(make_config().model.source or "", model)
    config = make_config(steps=2, checkpoint={"every": 1}, model={"source": str(model)})
    device = torch.device("cpu")
    with single_process_group(device):
        run_generation(config, 0, Recorder(), device)
    return config


def test_a_run_goes_on_where_its_storage_is_now(job: TrainConfig, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(job.run_uri, moved)
    newest, older = list_checkpoints(open_storage(str(moved)))
    for uri in (str(moved), f"{moved}/", newest.uri, f"{older.uri}/"):
        found = paused_job(uri, ["steps=9"])
        assert found.run_uri == str(moved)
        where = {"storage": str(moved.parent), "name": "renamed", "steps": 9}
        assert found == job.model_copy(update=where)


def test_names_and_folders_are_taken_as_they_are(
    job: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "checkpoints" / "step-1 # {a: b}" / "1e5"
    shutil.copytree(job.run_uri, moved)
    monkeypatch.chdir(moved.parent)
    (newest, _) = list_checkpoints(open_storage(str(moved)))
    for uri in ("1e5", newest.uri):
        assert paused_job(uri).run_uri == str(moved)


def test_a_run_cannot_be_resumed_at_another_place(job: TrainConfig) -> None:
    for elsewhere in ("name=another", "storage=/nowhere"):
        with pytest.raises(ConfigError, match="goes on in its place"):
            paused_job(job.run_uri, [elsewhere])


def test_a_model_whose_file_is_not_here_is_built_from_the_runs_own(job: TrainConfig) -> None:
    assert job.model.source is not None
    Path(job.model.source).unlink()
    found = paused_job(job.run_uri)
    assert found.model.source == f"{job.run_uri}/model/config.json"
    assert Path(found.model.source).exists()
    assert paused_job(job.run_uri) == found


def test_what_is_no_checkpoint_is_said(job: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint is here"):
        paused_job(str(tmp_path / "nothing"))
    missing = f"{job.run_uri}/checkpoints/step-00000007-abcd"
    with pytest.raises(CheckpointError, match="no complete checkpoint at this place"):
        paused_job(missing)
    assert run_of(missing) == job.run_uri
    with pytest.raises(ConfigError, match="stepz"):
        paused_job(job.run_uri, ["stepz=3"])
