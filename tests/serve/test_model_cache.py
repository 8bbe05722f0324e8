"""Copies of models go when their disk is full of them, but not those that are used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbtide.serve.model_cache import borrowed, give_back, locked, make_room

_HELD = """
import sys, pathlib
from ebbtide.serve.model_cache import locked
with locked(pathlib.Path(sys.argv[1])):
    pass
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three copies of 100 bytes, used a, b, c one after the other, on a disk of 2,000 bytes."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(total=2000, free=2000 - used(tmp_path))
    )
    for number, letter in enumerate("abc"):
        folder = copy(tmp_path, letter)
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(100))
        use = folder.with_name(f"{folder.name}.use")
        use.touch()
        os.utime(use, (number, number))
    return tmp_path


def copy(cache: Path, letter: str) -> Path:
    return cache / (letter * 32)


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copies(cache: Path) -> str:
    return "".join(sorted(path.name[0] for path in cache.iterdir() if path.is_dir()))


@pytest.mark.parametrize(
    ("needed_bytes", "left"),
    [(100, "abc"), (200, "abc"), (201, "bc"), (301, "c"), (1000, "")],
)
def test_those_that_were_used_last_stay(cache: Path, needed_bytes: int, left: str) -> None:
    make_room(cache, needed_bytes)
    assert copies(cache) == left
    assert not [path for path in cache.iterdir() if path.name[0] not in left]  # nor of their locks


def test_a_disk_that_is_full_of_other_things(cache: Path) -> None:
    other = cache / "other"
    other.write_bytes(bytes(1500))
    make_room(cache, 150)
    assert copies(cache) == "bc"


def test_what_is_used_by_a_process_stays_as_long_as_that(cache: Path) -> None:
    with (
        locked(copy(cache, "b")),
        subprocess.Popen(
            [sys.executable, "-c", _HELD, str(copy(cache, "a"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as user,
    ):
        assert user.stdout is not None
        user.stdout.readline()
        make_room(cache, 1000)
        assert copies(cache) == "ab"
        user.kill()
        user.wait()
        make_room(cache, 1000)
        assert copies(cache) == "b"
    make_room(cache, 1000)  # this process may read it still
    assert copies(cache) == "b"
    give_back(copy(cache, "b"))
    make_room(cache, 1000)
    assert copies(cache) == ""


def test_what_is_only_looked_at_is_given_back(cache: Path) -> None:
    with borrowed():
        with locked(copy(cache, "a")):
            pass
        make_room(cache, 1000)
        assert copies(cache) == "a"
    make_room(cache, 1000)
    assert copies(cache) == ""


def test_what_is_no_copy_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, link = cache / "my-model", cache / ("d" * 32)
    mine.mkdir()
    link.symlink_to(mine)
    stuck = copy(cache, "a")
    remove = shutil.rmtree

    def busy(folder: Path) -> None:
        if folder == stuck:
            raise OSError(16, "Device or resource busy")
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", busy)
    make_room(cache, 2000)
    assert mine.is_dir() and link.is_symlink() and stuck.is_dir()
    assert not copy(cache, "b").exists() and not copy(cache, "c").exists()
