"""Folders of copies go with their node, or when nobody takes them up again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.platform import node_memory


def make(root: Path, run: str, node: str) -> Path:
    path = node_memory.folder(run, node, root)
    path.mkdir()
    (path / "x.copy").touch()
    return path


def test_a_node_takes_the_copies_of_all_runs_with_it(tmp_path: Path) -> None:
    gone = [make(tmp_path, run, "a" * 56) for run in ("one", "two")]
    stays = make(tmp_path, "one", "b" * 56)
    node_memory.remove("a" * 56, tmp_path)
    assert not any(path.exists() for path in gone)
    assert stays.exists()


def test_what_nobody_takes_up_again_is_removed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = make(tmp_path, "one", "a")
    node_memory.remove_stale(tmp_path)
    assert left.exists()
    monkeypatch.setattr(node_memory, "_STALE_S", -1.0)
    node_memory.remove_stale(tmp_path)
    assert not left.exists()
