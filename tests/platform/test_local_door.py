"""Asking the owner of a local cluster for a node."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.platform.errors import ClusterError
from ebbtide.platform.local_door import Door, ask_for_node


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # sockets need short paths
        yield Path(path)


def test_each_who_asks_gets_a_node_of_its_own(folder: Path) -> None:
    names = iter(["n4", "n5"])
    door = Door(folder, lambda: next(names))
    assert [ask_for_node(folder), ask_for_node(folder)] == ["n4", "n5"]
    door.close()


def test_what_keeps_the_owner_from_it_reaches_who_asked(folder: Path) -> None:
    def fail() -> str:
        raise ClusterError("n4 did not start")

    door = Door(folder, fail)
    with pytest.raises(ClusterError, match="n4 did not start"):
        ask_for_node(folder)
    door.close()
    with pytest.raises(ClusterError, match="adds no node"):
        ask_for_node(folder)
