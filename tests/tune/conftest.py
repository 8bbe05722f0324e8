"""A training job's file for sweeps to start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.conftest import make_config, tiny  # noqa: F401  (a dataset, a model and a job)

TRAIN = """\
name: job
storage: {folder}/runs
steps: 30
model: {{source: model.json}}
data: {{uri: data, sequence_length: 16}}
batch: {{global_sequences: 4, micro_sequences: 2}}
optimizer: {{lr: 1e-3}}
schedule: {{warmup_steps: 10}}
"""


@pytest.fixture
def base_file(tmp_path: Path) -> Path:
    """``train.yaml`` in a folder of its own; sweeps beside it say ``base: train.yaml``."""
    path = tmp_path / "train.yaml"
    path.write_text(TRAIN.format(folder=tmp_path))
    return path
