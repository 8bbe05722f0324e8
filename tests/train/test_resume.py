"""What may change between two generations of a run, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.platform.errors import CheckpointError
from ebbtide.train import resume
from ebbtide.train.config import TrainConfig

BASE: dict[str, Any] = {
    "name": "run",
    "storage": "runs",
    "steps": 10,
    "model": {"source": "config.json"},
    "data": {"uri": "data", "sequence_length": 32},
    "batch": {"global_sequences": 8, "micro_sequences": 2},
    "optimizer": {"lr": 1e-3},
}


def job(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(BASE | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 3}, "seed is 3, was 0"),
        ({"data": {"uri": "data", "sequence_length": 16}}, "data.sequence_length is 16, was 32"),
        (
            {"batch": {"global_sequences": 4, "micro_sequences": 2}},
            "batch.global_sequences is 4, was 8",
        ),
    ],
)
def test_other_samples_are_another_run(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        resume.require_same_run("here", job(), "d", job(**changes), "d")


def test_another_dataset_is_another_run_wherever_it_lies() -> None:
    moved = job(data={"uri": "elsewhere", "sequence_length": 32})
    resume.require_same_run("here", job(), "d", moved, "d")
    assert resume.warnings(job(), moved) == []
    with pytest.raises(CheckpointError, match="the dataset at elsewhere is another one"):
        resume.require_same_run("here", job(), "d", moved, "e")


def test_what_changes_the_result_is_named_and_nothing_else() -> None:
    changed = job(
        steps=20,
        optimizer={"lr": 1e-3, "weight_decay": 0.2},
        workers={"min": 1, "max": 4},
        checkpoint={"every_steps": 7},
    )
    resume.require_same_run("here", job(), "d", changed, "d")
    assert resume.warnings(job(), changed) == [
        "optimizer.weight_decay is 0.2, was 0.1 when the checkpoint was made",
        "steps is 20, was 10 when the checkpoint was made",
    ]


def test_the_fingerprint_names_what_bits_depend_on() -> None:
    here = resume.fingerprint(job(), torch.device("cpu"))
    assert here["torch"] == torch.__version__ and here["threads"] == "1"
    assert resume.changed_fingerprint(here, here) == []
    older = here | {"torch": "2.0"}
    assert resume.changed_fingerprint(older, here) == [f"torch is {torch.__version__}, was 2.0"]
