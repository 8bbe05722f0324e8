"""A model directory is verified and checked before an engine is started on it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ebbtide.platform import export_manifest
from ebbtide.platform.config import parse
from ebbtide.platform.errors import ServeError
from ebbtide.platform.export_manifest import ExportManifest
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import open_storage
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.model_files import check_servable, fetch

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def config(text: str = "") -> ServeConfig:
    return parse(f"name: tide\nmodel: {{uri: out{text}}}\n", ServeConfig)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An export, as far as files go."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    (folder / "tokenizer.json").write_text("{}")
    manifest = ExportManifest(
        run="tide",
        step=3,
        dataset_sha256="0" * 64,
        dtype="fp32",
        parameters=64,
        files=export_manifest.describe(folder, [path.name for path in folder.iterdir()]),
    )
    (folder / "ebbtide.json").write_bytes(export_manifest.to_bytes(manifest))
    return folder


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_whole_export_is_used_where_it_lies(folder: Path) -> None:
    assert fetch(str(folder)) == folder
    check_servable(folder, config())


def test_a_flipped_byte_is_named(folder: Path) -> None:
    flip_a_byte(folder / "model.safetensors")
    with pytest.raises(ServeError, match=r"model\.safetensors does not have the checksum"):
        fetch(str(folder))


def test_a_damaged_manifest_is_named(folder: Path) -> None:
    (folder / "ebbtide.json").write_text("{}")
    with pytest.raises(ServeError, match=r"ebbtide\.json is damaged"):
        fetch(str(folder))


def test_a_directory_of_another_origin_is_served_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ebbtide"), "propagate", True)
    (folder / "ebbtide.json").unlink()
    assert fetch(str(folder)) == folder
    assert "cannot be verified" in caplog.text


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="no such directory"):
        fetch(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "holds no weights"),
        ("config.json", r"holds no config\.json"),
        ("tokenizer.json", "holds no tokenizer"),
    ],
)
def test_a_missing_file_is_said(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ServeError, match=message):
        check_servable(folder, config())


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ("[]", "model_type"),
        ("{", "not valid JSON"),
        ({**_LLAMA, "num_attention_heads": 8}, "heads of size 16"),
        ({**_LLAMA, "head_dim": 48}, "heads of size 48"),
        ({"model_type": "gpt2", "n_embd": 40, "n_head": 2}, "heads of size 20"),
    ],
)
def test_a_model_that_cannot_be_served(folder: Path, described: Any, message: str) -> None:
    text = described if isinstance(described, str) else json.dumps(described)
    (folder / "config.json").write_text(text)
    with pytest.raises(ServeError, match=message):
        check_servable(folder, config())


def test_a_length_beyond_the_models_positions(folder: Path) -> None:
    check_servable(folder, config(", max_model_len: 256"))
    with pytest.raises(ServeError, match="max_model_len is 257.*256 tokens"):
        check_servable(folder, config(", max_model_len: 257"))


def test_from_s3_once_per_machine(folder: Path, tmp_path: Path, s3_server: LocalS3) -> None:
    uri = f"s3://{s3_server.bucket}/served"
    storage = open_storage(uri)
    for path in folder.iterdir():
        storage.put_file(path.name, path)
    copy = fetch(uri, tmp_path / "cache")
    assert {path.name for path in copy.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    times = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert fetch(uri, tmp_path / "cache") == copy
    assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == times

    flip_a_byte(copy / "model.safetensors")  # a damaged copy is replaced
    assert fetch(uri, tmp_path / "cache") == copy
    assert (copy / "model.safetensors").read_bytes() == bytes(range(256))

    storage.put("model.safetensors", bytes(256))
    with pytest.raises(ServeError, match=r"model\.safetensors does not have the checksum"):
        fetch(uri, tmp_path / "other-cache")
    with pytest.raises(ServeError, match="holds nothing"):
        fetch(f"s3://{s3_server.bucket}/served-nothing", tmp_path / "cache")
