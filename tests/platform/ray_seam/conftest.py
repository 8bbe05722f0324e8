"""What tests of forked workers share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.platform.ray_seam.forking import Node, until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    node.module("heavy", "open('imported', 'a').write('once ')\nstate = []\n")
    yield node
    node.shell.kill()
    node.shell.communicate()
    for pid in node.processes():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not node.processes())
