"""Saves in the background: what the loop waits for, and what becomes of those that go wrong."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from ebbtide.platform.errors import StorageError, TrainingError
from ebbtide.platform.storage import LocalStorage, open_storage
from ebbtide.train import last_save
from ebbtide.train.checkpoint import Checkpoints
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import list_checkpoints, newest, verify
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
    return Saver(Checkpoints(storage, config, "data", "abcdef01", {}), state), state


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
    saver, _ = make_saver(config)
    saver._patience.spend(4.9, time.monotonic())
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


def refuse(config: TrainConfig) -> tuple[list[int], str, list[int], list[tuple[int, str]]]:
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
    then = [saved.info.step for saved in saver.wait()]
    return taken, said, then, [(each.step, each.why) for each in saver.missed()]


def test_a_refused_save_is_left_but_the_last_one_is_an_error(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    config = make_config()
    for taken, said, then, missed in ranks.run(2, refuse, config):
        assert (taken, then) == ([], [3])
        assert missed == [(1, "failed"), (2, "failed")]
        assert said.endswith("no space left")
    complete = [i for i in list_checkpoints(open_storage(config.run_uri)) if i.state == "complete"]
    assert [info.step for info in complete] == [3]


def refuse_the_last(config: TrainConfig) -> tuple[list[int], list[int]]:
    """One that is stored and not yet told of, and then one that is refused."""
    saver, _ = make_saver(config)
    Gate.open.set()
    saver.begin(moment(1))
    while not saver._outcomes:
        time.sleep(0.01)
    Gate.refuses = True
    saver.begin(moment(2), must=True)
    with pytest.raises(StorageError):
        saver.wait()
    return [saved.info.step for saved in saver.take()], [each.step for each in saver.missed()]


def test_a_save_before_a_refused_one_is_told_of(ranks: Ranks, make_config: MakeConfig) -> None:
    assert ranks.run(2, refuse_the_last, make_config()) == [([1], [2])] * 2


def insist(config: TrainConfig) -> list[int]:
    """The save after the last step is refused at first."""
    saver, _ = make_saver(config)
    Gate.open.set()
    Gate.refuses = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(last_save, "_FIRST_PAUSE_S", 0.1)
        saver.begin(moment(config.steps), must=True)
        threading.Timer(0.5, lambda: setattr(Gate, "refuses", False)).start()
        return [saved.info.step for saved in saver.wait()]


def test_the_save_after_the_last_step_is_tried_again(ranks: Ranks, make_config: MakeConfig) -> None:
    assert ranks.run(2, insist, make_config()) == [[12], [12]]


def save_with_a_full_disk(config: TrainConfig) -> tuple[list[int], list[str], list[int]]:
    """Rank 1's local disk takes no file of more than 64 KiB (as a full one: by the kernel)."""
    saver, _ = make_saver(config)
    Gate.open.set()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    saver.begin(moment(1))
    while not saver._outcomes:
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    none = [saved.info.step for saved in saver.take()]
    said = [each.message for each in saver.missed()]
    saver.begin(moment(2))
    return none, said, [saved.info.step for saved in saver.wait()]


def test_a_full_disk_fails_that_save_only(ranks: Ranks, make_config: MakeConfig) -> None:
    for none, said, then in ranks.run(2, save_with_a_full_disk, make_config()):
        assert (none, then) == ([], [2])
        assert len(said) == 1
        assert "could not be written to" in said[0] and "rank 1: " in said[0]
        assert said[0].endswith("free space there, or set TMPDIR")


class Watched(LocalStorage):
    """A slow storage: before and after every change, and between, a checkpoint can be loaded."""

    seen: ClassVar[list[int]] = []
    root: ClassVar[Path]

    def look(self) -> None:
        run = LocalStorage(self.root)
        found = newest(run)
        if found is None:
            assert not self.seen
        else:
            assert verify(run, found).state == "complete"
            self.seen.append(found.step)

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.look()
        super().put(key, data, if_absent=if_absent)
        self.look()

    def put_file(self, key: str, path: Path) -> None:
        self.look()
        whole = path.read_bytes()
        for part in (1, 2):  # what a reader could see of an upload that is slow
            staged = self._path(f"{key.rpartition('/')[0] or '.'}/.staged-{path.name}")
            staged.parent.mkdir(parents=True, exist_ok=True)
            staged.write_bytes(whole[: part * len(whole) // 3])
            self.look()
            staged.unlink()
        super().put_file(key, path)
        self.look()

    def delete(self, key: str) -> None:
        self.look()
        super().delete(key)
        self.look()

    def child(self, prefix: str) -> LocalStorage:
        return Watched(self._path(prefix))


def save_and_look(config: TrainConfig) -> list[int]:
    _, state = attempt(config)
    Watched.seen.clear()
    Watched.root = Path(config.run_uri)
    storage = Watched(Watched.root)
    saver = Saver(Checkpoints(storage, config, "data", "abcdef01", {}), state)
    for step in range(1, 6):
        saver.begin(moment(step), must=True)
        saver.wait()
    return Watched.seen


def test_with_keep_last_1_there_is_one_to_load_at_every_instant(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    config = make_config(checkpoint={"keep_last": 1, "keep_best": False})
    for seen in ranks.run(2, save_and_look, config):
        assert seen == sorted(seen)
        assert set(seen) >= {1, 2, 3, 4}
    assert [i.step for i in list_checkpoints(open_storage(config.run_uri))] == [5]


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
