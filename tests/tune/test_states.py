"""States in memory: found by other processes, gone when they are dropped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ebbtide.tune.states import States


def test_another_process_writes_and_reads_a_state() -> None:
    states = States()
    path = states.new("one")
    write = "import sys; open(sys.argv[1], 'wb').write(b'state')"
    subprocess.run([sys.executable, "-c", write, path], check=True)
    assert states.read("one") == Path(path).read_bytes() == b"state"
    copied = states.new("two", b"content")
    read = "import sys; print(open(sys.argv[1]).read())"
    found = subprocess.run([sys.executable, "-c", read, copied], capture_output=True, text=True)
    assert found.stdout == "content\n"
    states.clear()
    assert len(states) == 0 and not Path(path).exists() and not Path(copied).exists()


def test_a_new_state_takes_the_place_of_one_of_its_name() -> None:
    states = States()
    states.new("one", b"old")
    states.new("one", b"new")
    assert states.read("one") == b"new" and len(states) == 1
    states.drop(["one", "never there"])
    assert states.read("one") is None
