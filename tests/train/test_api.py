"""The documented names are there, and say what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.platform.config import dump
from ebbtide.train import api
from tests.train.conftest import MakeConfig


@pytest.mark.parametrize("name", api.__all__)
def test_every_name_is_documented(name: str) -> None:
    assert getattr(api, name).__doc__


def test_a_job_file_is_read_with_overrides(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(dump(make_config()))
    assert api.load(path) == make_config()
    assert api.load(path, ["optimizer.lr=1e-4"]).optimizer.lr == 1e-4
    assert api.checkpoints(make_config().run_uri) == []
