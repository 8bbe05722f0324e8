"""The same bytes have the same checksum, wherever they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.platform import checksums
from ebbtide.platform.storage import LocalStorage

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1


def test_bytes_files_and_objects_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_CHUNK_BYTES", 2)
    (tmp_path / "abc").write_bytes(b"abc")
    assert checksums.sha256(b"abc") == checksums.sha256(memoryview(b"abc")) == ABC
    assert checksums.sha256_of_file(tmp_path / "abc") == ABC
    assert checksums.sha256_of_stored(LocalStorage(tmp_path), "abc", 3) == ABC
    assert checksums.sha256_of_stored(LocalStorage(tmp_path), "abc", 0) == checksums.sha256(b"")
