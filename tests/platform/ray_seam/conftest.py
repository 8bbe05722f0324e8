"""What tests of forked workers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbtide.platform.ray_seam import fork_client
from tests.platform.ray_seam.forking import Node, ended


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node whose workers import ``heavy``."""
    write_heavy(tmp_path)
    with ended(Node(tmp_path)) as node:
        yield node


@pytest.fixture
def early(tmp_path: Path) -> Iterator[Node]:
    """A node that imports ``heavy`` while it starts, and whose workers import ``light``, too."""
    write_heavy(tmp_path)
    (tmp_path / "light.py").write_text("import heavy\nheavy.state.append('light')\n")
    with ended(Node(tmp_path, early="heavy,missing")) as node:
        node.environment[fork_client.MODULES] = "heavy,light"
        yield node


def write_heavy(folder: Path) -> None:
    text = (
        "import os\nopen(os.path.dirname(__file__) + '/imported', 'a').write('once ')\nstate = []\n"
    )
    (folder / "heavy.py").write_text(text)
