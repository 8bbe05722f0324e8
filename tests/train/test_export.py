"""The exported directory holds the trainer's model, and never overwrites anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbtide.platform import export_manifest
from ebbtide.platform.config import parse
from ebbtide.platform.errors import AlreadyExists, CheckpointError, ConfigError, DataError
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import open_storage
from ebbtide.train import checkpoint
from ebbtide.train.checkpoint import Checkpoints, list_checkpoints, training_state
from ebbtide.train.config import CheckpointConfig, TrainConfig
from ebbtide.train.dataset import index_digest, read_index
from ebbtide.train.export import export
from ebbtide.train.model import build_model, config_json
from ebbtide.train.prepare import PrepareConfig, prepare
from ebbtide.train.retention import collect

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
_GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 320,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
}


@dataclass(frozen=True)
class Run:
    """A run with one checkpoint, and the model that was saved."""

    uri: str
    checkpoint_uri: str
    data: Path
    model: nn.Module


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(8):
        words = " ".join(f"word{(7 * number + i) % 50} the tide" for i in range(200))
        (folder / f"{number}.txt").write_text(words)
    prepare(PrepareConfig(sources=(str(folder),), out=str(folder / "out"), vocab_size=300))
    return folder / "out"


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process only, as saving needs one."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # missing in torch's own list of names
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_run(folder: Path, data: Path, model_config: dict[str, Any], step: int = 7) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config))
    text = f"""
        {{name: tide, storage: {folder}, steps: 1, model: {{source: {folder}/config.json}},
        data: {{uri: {data}, sequence_length: 16}}, optimizer: {{lr: 0.1}},
        batch: {{global_sequences: 2, micro_sequences: 1}}}}"""
    config = parse(text, TrainConfig)
    model = build_model(config.model, read_index(str(data)).vocab_size, seed=3)
    checkpoints = Checkpoints(
        run=open_storage(config.run_uri),
        config=config,
        dataset_sha256=index_digest(str(data)),
        token="0a1b2c3d",
        fingerprint={},
        model_config=config_json(model),
    )
    state = training_state(model, torch.optim.AdamW(model.parameters()))
    saved = checkpoints.save(state, step=step, tokens_seen=1, loss=1.0, validation_loss=None)
    return Run(config.run_uri, saved.uri, data, model)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: Path, alone: None) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), data, {**_LLAMA, "tie_word_embeddings": True})


def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(40).reshape(2, 20) * 7 % 300
    model.eval()
    with torch.no_grad():
        return torch.as_tensor(model(tokens).logits)


@pytest.mark.parametrize(
    "model_config",
    [
        {**_LLAMA, "tie_word_embeddings": True},
        {**_LLAMA, "tie_word_embeddings": False},
        _GPT2,
    ],
    ids=["tied", "untied", "gpt2"],
)
def test_logits_equal_the_trainers(
    tmp_path: Path, data: Path, alone: None, model_config: dict[str, Any]
) -> None:
    run = make_run(tmp_path / "run", data, model_config)
    done = export(run.uri, str(tmp_path / "out"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(loaded), logits(run.model), rtol=0, atol=1e-5)
    assert loaded.dtype is torch.float32
    assert done.parameters == sum(parameter.numel() for parameter in run.model.parameters())


def test_a_directory_that_others_can_read(tmp_path: Path, run: Run) -> None:
    done = export(run.checkpoint_uri, str(tmp_path / "out"))
    assert (done.run, done.step, done.dtype) == ("tide", 7, "fp32")
    assert done.dataset_sha256 == index_digest(str(run.data))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {file.key for file in done.files} == names - {"ebbtide.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert export_manifest.read(open_storage(str(tmp_path / "out"))) == done
    assert export_manifest.damage(tmp_path / "out", done) is None

    eos_id = read_index(str(run.data)).eos_id
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert [written[f"{kind}_token_id"] for kind in ("eos", "bos", "pad")] == [eos_id] * 3
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["architectures"] == ["LlamaForCausalLM"]
    assert (described["dtype"], described["use_cache"]) == ("float32", True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("the tide")["input_ids"]) == "the tide"


def test_bf16_halves_the_weights(tmp_path: Path, run: Run) -> None:
    full, half = export(run.uri, str(tmp_path / "a")), export(run.uri, str(tmp_path / "b"), "bf16")
    assert half.size_bytes < 0.75 * full.size_bytes
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert loaded.dtype is torch.bfloat16
    assert torch.allclose(logits(loaded.float()), logits(run.model), rtol=0, atol=0.05)


def test_the_same_export_again_changes_nothing(tmp_path: Path, run: Run) -> None:
    first = export(run.uri, str(tmp_path / "out"))
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert export(run.checkpoint_uri, str(tmp_path / "out")) == first
    assert times == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_a_half_written_export_is_finished(tmp_path: Path, run: Run) -> None:
    first = export(run.uri, str(tmp_path / "out"))
    (tmp_path / "out" / "ebbtide.json").unlink()
    (tmp_path / "out" / "model.safetensors").unlink()
    assert export(run.uri, str(tmp_path / "out")) == first
    assert export_manifest.damage(tmp_path / "out", first) is None


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "ebbtide.json"])
def test_other_data_is_refused_and_kept(tmp_path: Path, run: Run, name: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(AlreadyExists, match=name):
        export(run.uri, str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_to_s3_and_another_export_there_is_refused(
    tmp_path: Path, run: Run, s3_server: LocalS3
) -> None:
    out = f"s3://{s3_server.bucket}/export"
    done = export(run.uri, out)
    assert export(run.uri, out) == done
    storage = open_storage(out)
    for file in done.files:
        storage.get_file(file.key, tmp_path / file.key)
    assert export_manifest.damage(tmp_path, done) is None
    with pytest.raises(AlreadyExists):
        export(run.uri, out, "bf16")
    assert export_manifest.read(storage) == done


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        export(str(tmp_path / "nowhere"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_run_at_work_may_remove_what_is_being_read(
    tmp_path: Path, data: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", data, _LLAMA)
    read, sources = checkpoint.read_model_state, []

    def replaced(source: str) -> Any:
        sources.append(source)
        if len(sources) == 1:
            make_run(tmp_path / "run", data, _LLAMA, step=8)
            newest, old = list_checkpoints(storage := open_storage(run.uri))
            assert collect(storage, newest, CheckpointConfig(keep_last=1)) == [old]
        return read(source)

    monkeypatch.setattr(checkpoint, "read_model_state", replaced)
    assert export(run.uri, str(tmp_path / "out")).step == 8
    assert len(sources) == 2
    with pytest.raises(CheckpointError):
        export(run.checkpoint_uri, str(tmp_path / "old"))


def test_another_dataset_in_the_place_of_the_runs(tmp_path: Path, data: Path, alone: None) -> None:
    moved = tmp_path / "data"
    moved.mkdir()
    for path in data.rglob("*"):
        if path.is_file():
            (moved / path.relative_to(data)).parent.mkdir(parents=True, exist_ok=True)
            (moved / path.relative_to(data)).write_bytes(path.read_bytes())
    run = make_run(tmp_path / "run", moved, _LLAMA)
    index = json.loads((moved / "index.json").read_text())
    (moved / "index.json").write_text(json.dumps({**index, "corpus_bytes": 1}))
    with pytest.raises(DataError, match="not the dataset"):
        export(run.uri, str(tmp_path / "out"))


def test_a_model_that_is_not_of_transformers(tmp_path: Path, data: Path, alone: None) -> None:
    config = parse(
        f"""{{name: own, storage: {tmp_path}, steps: 1, model: {{factory: "mine:build"}},
        data: {{uri: {data}, sequence_length: 16}}, optimizer: {{lr: 0.1}},
        batch: {{global_sequences: 1, micro_sequences: 1}}}}""",
        TrainConfig,
    )
    model = nn.Linear(2, 2)
    Checkpoints(open_storage(config.run_uri), config, index_digest(str(data)), "0a", {}).save(
        training_state(model, torch.optim.AdamW(model.parameters())), 1, 1, None, None
    )
    with pytest.raises(ConfigError, match=r"model\.factory"):
        export(config.run_uri, str(tmp_path / "out"))
