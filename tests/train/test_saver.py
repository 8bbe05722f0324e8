"""Saves in the background: what the loop waits for, and what becomes of those that go wrong."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ebbtide.platform.errors import StorageError, TrainingError
from ebbtide.platform.storage import LocalStorage, open_storage
from ebbtide.train import saver as module
from ebbtide.train.checkpoint import Checkpoints
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import list_checkpoints
from ebbtide.train.peers import Moment
from ebbtide.train.saver import Saver
from tests.train.conftest import MakeConfig
from tests.train.ranks import Ranks
from tests.train.test_checkpoint import attempt, everything


class Gate:
    """Holds up what rank 1 stores, or refuses it."""

    open = threading.Event()
    refuses = False


class GatedStorage(LocalStorage):
    def put_file(self, key: str, path: Path) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            assert Gate.open.wait(60)
            if Gate.refuses:
                raise StorageError(f"{key}: no space left")
        super().put_file(key, path)

    def child(self, prefix: str) -> LocalStorage:
        return GatedStorage(self._path(prefix))


def moment(step: int) -> Moment:
    return Moment(step, 0, None, None)


def make_saver(config: TrainConfig) -> tuple[Saver, dict[str, torch.Tensor]]:
    Gate.open.clear()
    Gate.refuses = False
    _, state = attempt(config)
    storage = GatedStorage(Path(config.run_uri))
    return Saver(Checkpoints(storage, config, "data", "abcdef01", {}), state, 3), state


def change_while_saving(config: TrainConfig) -> tuple[float, list[int], list[int]]:
    saver, state = make_saver(config)
    for tensor in state.values():
        tensor.fill_(1.0)
    start_s = time.monotonic()
    saver.begin(moment(3))
    began_s = time.monotonic() - start_s
    before = [saved.info.step for saved in saver.take()]
    for tensor in state.values():
        tensor.fill_(2.0)  # the next step
    Gate.open.set()
    return began_s, before, [saved.info.step for saved in saver.wait()]


def test_a_save_is_of_the_state_when_it_was_begun(ranks: Ranks, make_config: MakeConfig) -> None:
    config = make_config()
    for _, before, after in ranks.run(2, change_while_saving, config):
        assert (before, after) == ([], [3])
    assert all(bool((tensor == 1.0).all()) for tensor in everything(config).values())


def save_too_often(config: TrainConfig) -> tuple[list[int], list[int]]:
    module._PATIENCE_S = 0.1
    saver, _ = make_saver(config)
    saver.begin(moment(1))
    saver.begin(moment(2))  # rank 1 is at work: left out everywhere
    Gate.open.set()
    first = [saved.info.step for saved in saver.wait()]
    saver.begin(moment(3), must=True)
    return first, [saved.info.step for saved in saver.wait()]


def test_what_the_storage_is_too_slow_for_is_left_out_on_all_ranks(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    config = make_config()
    assert ranks.run(3, save_too_often, config) == [([1], [3])] * 3
    steps = [info.step for info in list_checkpoints(open_storage(config.run_uri))]
    assert steps == [3, 1]


def refuse(config: TrainConfig) -> tuple[list[int], str, list[int]]:
    saver, _ = make_saver(config)
    Gate.refuses = True
    Gate.open.set()
    saver.begin(moment(1))
    while not saver._outcomes:
        time.sleep(0.01)
    taken = [saved.info.step for saved in saver.take()]
    saver.begin(moment(2), must=True)
    try:
        saver.wait()
        said = "nothing"
    except StorageError as error:
        said = str(error)
    Gate.refuses = False
    saver.begin(moment(3))
    saver._outcomes.clear()
    return taken, said, [saved.info.step for saved in saver.wait()]


def test_a_refused_save_is_left_but_the_last_one_is_an_error(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    config = make_config()
    for taken, said, then in ranks.run(2, refuse, config):
        assert (taken, then) == ([], [3])
        assert said.endswith("no space left")
    complete = [i for i in list_checkpoints(open_storage(config.run_uri)) if i.state == "complete"]
    assert [info.step for info in complete] == [3]


def save_nonsense(config: TrainConfig) -> None:
    saver, state = make_saver(config)
    Gate.open.set()
    next(iter(state.values())).fill_(float("nan"))
    saver.begin(moment(4))
    saver.wait()


def test_a_state_that_is_not_finite_is_never_saved(ranks: Ranks, make_config: MakeConfig) -> None:
    config = make_config()
    with pytest.raises(TrainingError, match="step 4: the training state has values that are not"):
        ranks.run(2, save_nonsense, config)
    assert list_checkpoints(open_storage(config.run_uri)) == []
