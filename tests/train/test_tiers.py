"""Where a generation starts from: memory before storage, and never another run's."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.platform.errors import StorageError
from ebbtide.platform.storage import open_storage
from ebbtide.train.checkpoint import Checkpoints, newest
from ebbtide.train.config import TrainConfig
from ebbtide.train.loop import run_generation
from ebbtide.train.memory import Folder
from tests.train.conftest import MakeConfig
from tests.train.ranks import Ranks, Recorder

NODES = ("tiers-a", "tiers-b")


@pytest.fixture
def config(make_config: MakeConfig) -> Iterator[TrainConfig]:
    config = make_config(steps=9, checkpoint={"every": 100, "give_up_s": 0}, digest=True)
    yield config
    for node in NODES:
        Folder(config.run_uri, node).remove()


class Stop(Exception):
    """The process is killed here, as far as the run can tell."""


def train_until(config: TrainConfig, stop: int | None, world_size: int) -> list[Any]:
    """The steps made; ``stop``: end like a kill when that step is made and some copy shared."""

    class Stopping(Recorder):
        def on_step(self, result: Any) -> None:
            super().on_step(result)
            if result.step == stop:
                while not all(Folder(config.run_uri, node).found() for node in NODES[:world_size]):
                    time.sleep(0.01)
                raise Stop

    recorder = Stopping()
    with contextlib.suppress(Stop):
        run_generation(config, 0, recorder, torch.device("cpu"), nodes=NODES[:world_size])
    return recorder.steps


def test_a_killed_run_goes_on_from_memory_with_the_same_bits(
    ranks: Ranks, config: TrainConfig, make_config: MakeConfig
) -> None:
    whole = make_config(name="whole", steps=9, checkpoint={"every": 100}, digest=True)
    undisturbed = ranks.run(1, train_until, whole, None, 1)[0]
    first = ranks.run(2, train_until, config, 8, 2)[0]
    assert [step.step for step in first] == list(range(1, 9))
    again = ranks.run(2, train_until, config, None, 2)[0]
    assert again[0].step > 1  # nothing is in storage
    assert [s.digests for s in again] == [s.digests for s in undisturbed[again[0].step - 1 :]]
    assert not any(Folder(config.run_uri, node).path.exists() for node in NODES)


def test_a_run_that_was_deleted_is_not_taken_up(ranks: Ranks, config: TrainConfig) -> None:
    ranks.run(2, train_until, config, 7, 2)
    shutil.rmtree(Path(config.run_uri))
    assert ranks.run(2, train_until, config, None, 2)[0][0].step == 1


def fail_to_store(config: TrainConfig) -> None:
    """All the steps; the save after the last is refused when it is whole in memory."""

    def refuse(*_: Any) -> None:
        while not all(
            any(copy.step == config.steps for copy, _ in Folder(config.run_uri, node).found())
            for node in NODES
        ):
            time.sleep(0.01)
        raise StorageError("no space left")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(Checkpoints, "save", refuse)
        run_generation(config, 0, Recorder(), torch.device("cpu"), nodes=NODES)


def test_a_run_is_finished_only_when_its_last_state_is_in_storage(
    ranks: Ranks, config: TrainConfig
) -> None:
    ranks.run(2, fail_to_store, config)
    run = open_storage(config.run_uri)
    assert newest(run) is None
    assert ranks.run(2, train_until, config, None, 2) == [[], []]
    found = newest(run)
    assert found is not None
    assert found.step == config.steps
