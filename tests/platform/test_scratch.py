"""Scratch folders go with their block or, after a SIGKILL, with the next one that is made."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbtide.platform.scratch import remove_abandoned, scratch_folder

HOLDER = """
import sys, time
from pathlib import Path
from ebbtide.platform.scratch import scratch_folder

with scratch_folder("hold", Path(sys.argv[1])) as folder:
    (folder / "part").write_bytes(b"x" * 100)
    print(folder, flush=True)
    time.sleep(600)
"""


def age(folder: Path) -> None:
    long_ago_s = time.time() - 3600
    os.utime(folder, (long_ago_s, long_ago_s))


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom"), scratch_folder("test", tmp_path) as folder:
        (folder / "part").touch()
        raise ValueError("boom")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = []
    for holder in holders:
        assert holder.stdout is not None
        folders.append(Path(holder.stdout.readline().strip()))
        age(folders[-1])
    other = tmp_path / "somebody-elses"
    other.mkdir()
    age(other)
    holders[0].kill()
    holders[0].communicate()
    with scratch_folder("next", tmp_path) as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folders[1], other, folder])
    holders[1].kill()
    holders[1].communicate()


def test_a_folder_whose_process_has_not_locked_it_yet_is_left(tmp_path: Path) -> None:
    with scratch_folder("test", tmp_path) as folder:
        name = folder.name
    (tmp_path / name).mkdir()
    remove_abandoned(tmp_path)
    assert (tmp_path / name).exists()
    age(tmp_path / name)
    remove_abandoned(tmp_path)
    assert not (tmp_path / name).exists()
