"""The export's manifest finds every kind of damage, and names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.platform import export_manifest
from ebbtide.platform.errors import StorageError
from ebbtide.platform.export_manifest import ExportManifest
from ebbtide.platform.storage import open_storage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)))
    return tmp_path


def describe(folder: Path) -> ExportManifest:
    return ExportManifest(
        run="tide",
        step=3,
        dataset_sha256="0" * 64,
        dtype="fp32",
        parameters=64,
        files=export_manifest.describe(folder, ["model.safetensors", "config.json"]),
    )


def test_round_trip(folder: Path) -> None:
    manifest = describe(folder)
    assert [file.key for file in manifest.files] == ["config.json", "model.safetensors"]
    assert manifest.size_bytes == 258
    storage = open_storage(str(folder))
    assert export_manifest.read(storage) is None
    storage.put("ebbtide.json", export_manifest.to_bytes(manifest))
    assert export_manifest.read(storage) == manifest
    assert export_manifest.damage(folder, manifest) is None


def test_a_flipped_byte_is_named(folder: Path) -> None:
    manifest = describe(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[100] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert "model.safetensors does not have the checksum" in str(
        export_manifest.damage(folder, manifest)
    )


def test_a_short_and_a_missing_file_are_named(folder: Path) -> None:
    manifest = describe(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    assert "model.safetensors has 5 bytes instead of 256" in str(
        export_manifest.damage(folder, manifest)
    )
    (folder / "config.json").unlink()
    assert "config.json is missing" in str(export_manifest.damage(folder, manifest))


@pytest.mark.parametrize("text", ["", "{}", '{"format_version": 2}', "not json"])
def test_a_damaged_manifest_is_said(folder: Path, text: str) -> None:
    (folder / "ebbtide.json").write_text(text)
    with pytest.raises(StorageError, match=r"ebbtide\.json is damaged"):
        export_manifest.read(open_storage(str(folder)))
