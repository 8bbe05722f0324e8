"""Sockets between an engine and its replica are in a folder that goes with them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ebbtide.serve.engine_sockets import TEMPORARY, VARIABLE, remove_left, socket_folder

TOKEN = "t"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder with a name that leaves room for sockets'."""
    monkeypatch.delenv(VARIABLE, raising=False)
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_folder_goes_with_its_replica(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEMPORARY, str(short))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with socket_folder(TOKEN):
        folder = Path(os.environ[VARIABLE])
        assert folder.parent == short and os.environ[TEMPORARY] == str(folder)
        assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == short
        made = subprocess.run(
            [sys.executable, "-c", "import tempfile; print(tempfile.mkstemp()[1])"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert Path(made.stdout.strip()).parent == folder
    assert VARIABLE not in os.environ and os.environ[TEMPORARY] == str(short)
    (kernels,) = short.iterdir()
    assert kernels.name.startswith("torchinductor")
    kernels.rmdir()
    short.rmdir()


@pytest.mark.parametrize("who", ["the next", "the endpoint"])
def test_what_a_killed_replica_left_is_removed(short: Path, who: str) -> None:
    code = (
        "import os, socket; from ebbtide.serve.engine_sockets import *\n"
        "with socket_folder('t'):\n"
        "    s = socket.socket(socket.AF_UNIX); s.bind(os.environ[VARIABLE] + '/s')\n"
        "    print(os.environ[VARIABLE], flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short)},
    )
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    os.utime(left, (0, 0))  # one that is young may be about to be used
    with socket_folder(TOKEN):
        assert (left / "s").is_socket()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    remove_left("of another endpoint")
    assert left.exists()
    if who == "the next":
        with socket_folder(TOKEN):
            assert not left.exists()
    else:
        remove_left(TOKEN)
    assert not list(short.iterdir())
    short.rmdir()


def test_a_long_path_is_none_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = os.environ.get(TEMPORARY)
    for length in (32, 33, 90):
        parent = Path("/tmp") / ("x" * (length - len("/tmp/")))
        parent.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        with socket_folder(TOKEN), socket.socket(socket.AF_UNIX) as each:
            assert (parent in Path(os.environ[VARIABLE]).parents) == (length <= 32)
            if length > 32:  # other files stay where the user wants them
                assert os.environ.get(TEMPORARY) == before
            each.bind(f"{os.environ[VARIABLE]}/{'u' * 36}")
        parent.rmdir()


def test_a_folder_of_the_users_own_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with socket_folder(TOKEN):
        assert os.environ[VARIABLE] == str(tmp_path)
    assert os.environ[VARIABLE] == str(tmp_path) and tmp_path.exists()
