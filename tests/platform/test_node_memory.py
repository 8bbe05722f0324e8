"""Folders of copies go with their node, or when nobody takes them up again."""

from __future__ import annotations

import subprocess
import sys
import time
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


def test_a_process_takes_the_copies_on_its_own_node_along_when_it_is_killed(
    tmp_path: Path,
) -> None:
    gone, stays = make(tmp_path, "one", "a"), make(tmp_path, "one", "b")
    code = f"""
import os, pathlib, signal
from ebbtide.platform import node_memory
with node_memory.owned("a", pathlib.Path({str(tmp_path)!r})):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    limit_s = time.monotonic() + 20.0
    while gone.exists() and time.monotonic() < limit_s:
        time.sleep(0.05)
    assert not gone.exists()
    assert stays.exists()


def test_a_node_of_a_process_ends_with_its_block(tmp_path: Path) -> None:
    path = make(tmp_path, "one", "a")
    with node_memory.owned("a", tmp_path):
        assert path.exists()
    assert not path.exists()
