"""The training state through storage: bitwise, by any world size, and never one that is broken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ebbtide.platform.checksums import sha256
from ebbtide.platform.errors import CheckpointError, EbbtideError, StorageError, TrainingError
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import LocalStorage, open_storage
from ebbtide.train import dcp, manifest
from ebbtide.train.checkpoint import (
    Checkpoints,
    list_checkpoints,
    read_model_config,
    read_model_state,
    read_train_config,
    training_state,
)
from ebbtide.train.config import TrainConfig
from ebbtide.train.marks import claim
from ebbtide.train.model import build_model
from ebbtide.train.optim import build_optimizer
from ebbtide.train.shard import local, shard
from ebbtide.train.trial import single_process_group
from tests.train.conftest import MakeConfig
from tests.train.ranks import Ranks, first, train

CPU = torch.device("cpu")


def attempt(config: TrainConfig, token: str = "abcdef01") -> tuple[Checkpoints, dict[str, Tensor]]:
    """A fresh state of the job in the default process group, and what saves it."""
    from torch.distributed.device_mesh import init_device_mesh

    model = build_model(config.model, 300, config.seed)
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), config.precision)
    state = training_state(model, build_optimizer(model, config.optimizer))
    checkpoints = Checkpoints(open_storage(config.run_uri), config, "data", token, {"torch": "1"})
    return checkpoints, state


def save_noise(config: TrainConfig) -> None:
    """Save a state in which every tensor, the optimizer's too, is full of its own numbers."""
    checkpoints, state = attempt(config)
    torch.manual_seed(dist.get_rank())
    for tensor in state.values():
        tensor.add_(torch.rand_like(tensor))
    checkpoints.save(state, 3, 768, 2.5, None)


class RefusingRank1(LocalStorage):
    """A local storage that takes no file from rank 1."""

    def put_file(self, key: str, path: Path) -> None:
        if dist.get_rank() == 1:
            raise StorageError(f"{key}: no space left")
        super().put_file(key, path)

    def child(self, prefix: str) -> LocalStorage:
        return RefusingRank1(self._path(prefix))


def save_with_a_refusal(config: TrainConfig) -> None:
    checkpoints, state = attempt(config)
    refusing = RefusingRank1(Path(config.run_uri))
    broken = Checkpoints(refusing, config, "data", "abcdef01", {})
    broken.save(state, 1, 0, None, None)


def everything(config: TrainConfig) -> dict[str, Tensor]:
    """Every tensor of the run's newest checkpoint, whole."""
    run = open_storage(config.run_uri)
    info = manifest.newest(run)
    assert info is not None
    checkpoint = open_storage(info.uri)
    return dcp.read_whole(checkpoint, manifest.read_manifest(checkpoint), "")


@pytest.fixture
def alone() -> Iterator[None]:
    with single_process_group(CPU):
        yield


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture
def saved(ranks: Ranks, make_config: MakeConfig, saved_once: Path) -> TrainConfig:
    """A run of 4 steps by two ranks, with checkpoints at 1, 2 and 3, stopped there. A copy."""
    config = make_config(
        steps=4,
        checkpoint={"every": 1, "keep_last": 9},
        validation={"every_steps": 1, "sequences": 2},
    )
    if not (saved_once / "run").exists():
        original = config.model_copy(update={"storage": str(saved_once)})
        ranks.run(2, train, original, 3)
    shutil.copytree(saved_once / "run", config.run_uri)
    return config


def shard_of(config: TrainConfig, step: int) -> Path:
    found = next(i for i in list_checkpoints(open_storage(config.run_uri)) if i.step == step)
    return Path(found.uri, "__1_0.distcp")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def digest_of_restored(config: TrainConfig) -> str:
    """Of every tensor of the newest checkpoint, as these ranks restore it; run by ranks."""
    checkpoints, state = attempt(config)
    assert checkpoints.restore(state) is not None
    return whole_digest(
        {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}
    )


def whole_digest(tensors: Mapping[str, Tensor]) -> str:
    parts = [f"{name} {tensors[name].shape}" for name in sorted(tensors)]
    parts += [sha256(tensors[name].contiguous().numpy().tobytes()) for name in sorted(tensors)]
    return sha256(" ".join(parts).encode())


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_any_world_size_reads_any_others_state_bitwise(
    ranks: Ranks, make_config: MakeConfig, saved_by: int
) -> None:
    config = make_config()
    ranks.run(saved_by, save_noise, config)
    tensors = everything(config)
    assert {name.split(".")[0] for name in tensors} == {"model", "optimizer"}
    assert any(name.endswith("exp_avg_sq") for name in tensors)
    for read_by in (1, 2, 3, 4):
        digests = ranks.run(read_by, digest_of_restored, config)
        assert set(digests) == {whole_digest(tensors)}


def test_a_checkpoint_tells_what_it_is(saved: TrainConfig, ranks: Ranks) -> None:
    described, tensors = read_model_state(saved.run_uri)
    assert (described.run, described.step, described.world_size) == ("run", 3, 2)
    assert described.tokens_seen == 3 * saved.tokens_per_step
    assert described.fingerprint["threads"] == "1"
    assert read_train_config(saved.run_uri).optimizer == saved.optimizer
    assert '"llama"' in str(read_model_config(saved.run_uri))
    assert "lm_head.weight" not in tensors  # tied to the embedding, which is there
    assert tensors["model.embed_tokens.weight"].shape == (301, 40)
    older = next(i for i in list_checkpoints(open_storage(saved.run_uri)) if i.step == 2)
    assert older.validation_loss is not None
    assert read_model_state(older.uri)[0].step == 2


def test_a_flipped_byte_sends_the_run_to_the_next_older_one(
    saved: TrainConfig, ranks: Ranks, tmp_path: Path
) -> None:
    whole = saved.model_copy(update={"storage": str(tmp_path / "whole")})
    shutil.copytree(saved.run_uri, whole.run_uri)
    flip(shard_of(saved, 3))
    with pytest.raises(CheckpointError, match="__1_0.distcp does not have the checksum"):
        read_model_state(saved.run_uri)
    fallen = first(ranks.run(2, train, saved))
    assert [step.step for step in fallen.steps] == [3, 4]
    straight = first(ranks.run(2, train, whole))
    assert [step.step for step in straight.steps] == [4]
    assert fallen.steps[-1].loss == pytest.approx(straight.steps[-1].loss, rel=1e-6)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
@pytest.mark.parametrize("key", ["__0_0.distcp", ".metadata", "train.yaml", "manifest.json"])
def test_whatever_is_damaged_is_named_and_the_older_one_is_taken(
    alone: None,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    key: str,
    damage: str,
) -> None:
    config = make_config()
    checkpoints, state = attempt(config)
    for step in (1, 2):
        for tensor in state.values():
            tensor.fill_(float(step))
        info = checkpoints.save(state, step, 0, None, None)
    path = Path(info.uri, key)
    if damage == "flip":
        flip(path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        path.unlink()
    found = checkpoints.restore(state)
    assert found is not None and found[1].step == 1
    assert all(bool((local(tensor) == 1.0).all()) for tensor in state.values())
    listed = next(i for i in list_checkpoints(checkpoints.run) if i.step == 2)
    verified = manifest.verify(checkpoints.run, listed)
    assert verified.state == ("incomplete" if damage == "delete" else "corrupt")
    assert key in str(verified.problem)
    if (key, damage) != ("manifest.json", "delete"):  # as if it had never been committed
        assert f"checkpoint {info.name} cannot be used" in caplog.text
        assert key in caplog.text
    with pytest.raises(EbbtideError):
        read_model_state(info.uri)
        read_train_config(info.uri)


def test_a_runs_folder_that_was_emptied_under_it_is_its_own_again(
    alone: None, make_config: MakeConfig
) -> None:
    checkpoints, state = attempt(make_config())
    mine = replace(checkpoints, run_id="mine")
    assert claim(mine.run, "mine") == "mine"
    mine.save(state, 1, 0, None, None)
    shutil.rmtree(mine.run.uri)
    mine.save(state, 2, 0, None, None)
    assert claim(mine.run, "another") == "mine"


def test_when_all_are_damaged_the_run_does_not_start_afresh(
    saved: TrainConfig, ranks: Ranks
) -> None:
    for step in (1, 2, 3):
        flip(shard_of(saved, step))
    with pytest.raises(CheckpointError, match="none of its 3 checkpoints"):
        ranks.run(2, train, saved)


def test_a_stale_higher_step_does_not_cost_the_next_save(saved: TrainConfig, ranks: Ranks) -> None:
    # Case C1, last part: 3 is there but useless; with keep_last 1 the next save must survive.
    flip(shard_of(saved, 3))
    config = saved.model_copy(
        update={"checkpoint": saved.checkpoint.model_copy(update={"keep_last": 1})}
    )
    trace = first(ranks.run(1, train, config, 3))
    assert [info.step for info in trace.saved] == [3]
    found = list_checkpoints(open_storage(config.run_uri))
    assert trace.saved[0].name in {info.name for info in found}


def test_another_model_seed_or_dataset_is_refused(alone: None, make_config: MakeConfig) -> None:
    config = make_config()
    checkpoints, state = attempt(config)
    checkpoints.save(state, 1, 0, None, None)

    def restore(other: TrainConfig, data: str = "data", drop: str | None = None) -> None:
        again, tensors = attempt(other)
        Checkpoints(again.run, other, data, "ff", {}).restore(
            {name: tensor for name, tensor in tensors.items() if name != drop}
        )

    with pytest.raises(CheckpointError, match="seed is 2, was 1"):
        restore(config.model_copy(update={"seed": 2}))
    with pytest.raises(CheckpointError, match="dataset at"):
        restore(config, data="another")
    with pytest.raises(CheckpointError, match=r"has model\.model\.norm\.weight, which"):
        restore(config, drop="model.model.norm.weight")
    state["model.model.norm.weight"] = torch.zeros(40, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"norm\.weight is torch.float32, .* torch.float64"):
        checkpoints.restore(state)
    state["model.model.norm.weight"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \[40\].* expects \[7\]"):
        checkpoints.restore(state)


def test_changes_that_change_the_result_are_warned_of(
    alone: None, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    checkpoints, state = attempt(config)
    checkpoints.save(state, 1, 0, None, None)
    faster = make_config(optimizer={"lr": 1e-2}, workers={"max": 2})
    again, state = attempt(faster)
    found = Checkpoints(again.run, faster, "data", "ff", {"torch": "2"}).restore(state)
    assert found is not None
    assert "optimizer.lr is 0.01, was 0.003" in caplog.text
    assert "torch is 2, was 1" in caplog.text
    assert "workers" not in caplog.text


def test_what_is_not_finite_is_not_saved(alone: None, make_config: MakeConfig) -> None:
    checkpoints, state = attempt(make_config())
    state["optimizer.model.norm.weight.exp_avg"].fill_(float("inf"))
    with pytest.raises(TrainingError, match=r"step 5: .*optimizer\.model\.norm\.weight\.exp_avg"):
        checkpoints.save(state, 5, 0, None, None)
    assert list_checkpoints(checkpoints.run) == []


def test_a_save_that_fails_on_one_rank_fails_on_all(ranks: Ranks, make_config: MakeConfig) -> None:
    config = make_config()
    with pytest.raises(StorageError, match="no space left"):
        ranks.run(2, save_with_a_refusal, config)
    states = [info.state for info in list_checkpoints(open_storage(config.run_uri))]
    assert states == ["incomplete"]


def test_a_crash_anywhere_in_a_save_leaves_the_older_one(
    alone: None, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    checkpoints, state = attempt(config)
    checkpoints.save(state, 1, 0, None, None)
    writes: list[str] = []

    def dying(real: Any, after: int) -> Any:
        def put(self: LocalStorage, key: str, *arguments: Any, **options: Any) -> None:
            if len(writes) == after:
                raise KeyboardInterrupt
            writes.append(key)
            real(self, key, *arguments, **options)

        return put

    for after in range(20):
        writes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(LocalStorage, "put", dying(LocalStorage.put, after))
            patch.setattr(LocalStorage, "put_file", dying(LocalStorage.put_file, after))
            try:
                attempt(config, f"{after:08x}")[0].save(state, 2, 0, None, None)
            except KeyboardInterrupt:
                found = manifest.newest(checkpoints.run)
                assert found is not None and found.step == 1
            else:
                break
    assert writes[-2:] == ["rank-0.json", "manifest.json"]
    found = manifest.newest(checkpoints.run)
    assert found is not None and found.step == 2


def test_over_s3(alone: None, make_config: MakeConfig, s3_server: LocalS3) -> None:
    config = make_config(storage=f"s3://{s3_server.bucket}/core-checkpoints")
    checkpoints, state = attempt(config)
    info = checkpoints.save(state, 1, 0, None, 1.25)
    assert list_checkpoints(checkpoints.run) == [info]
    assert manifest.verify(checkpoints.run, info) == info
    _, tensors = read_model_state(config.run_uri)
    again, fresh = attempt(config.model_copy(update={"storage": config.storage}))
    for tensor in fresh.values():
        tensor.zero_()
    found = again.restore(fresh)
    assert found is not None and found[0] == info.uri
    embedding = fresh["model.model.embed_tokens.weight"].full_tensor()  # type: ignore[attr-defined]
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"])
