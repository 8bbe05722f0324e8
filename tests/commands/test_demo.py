from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ebbtide.commands.demo import _claimed
from ebbtide.commands.demo_shell import Shell
from ebbtide.commands.demo_summary import Summary, table
from ebbtide.platform.errors import AlreadyExists, EbbtideError

SUMMARY = Summary(
    parameters=3_441_216,
    corpus_bytes=13_209_994,
    steps=240,
    world_sizes=[4, 3, 2, 3],
    attempts=4,
    steps_lost_notice=0,
    steps_lost_kill=3,
    kill_to_step_s=5.25,
    loss_first=8.3351,
    loss_last=5.5,
    valid_loss=5.6,
    unigram_entropy=6.56,
    tokens_per_s=2048.0,
    cost_usd=0.0035,
    cost_on_demand_usd=0.01,
    learning_rate=3e-3,
    completion="main():\n",
    completion_matches_transformers=True,
    demo_s=300.0,
)


def shown(summary: Summary) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(table(summary))
    text = console.file.getvalue() if isinstance(console.file, StringIO) else ""
    return text


def test_the_table_tells_every_figure() -> None:
    text = shown(SUMMARY)
    for told in ("4 → 3 → 2 → 3", "3 steps lost, next step after 5.2 s", "0.960 below", "65% less"):
        assert told in text


def test_an_unknown_price_is_said_and_no_saving_is_made_up() -> None:
    text = shown(SUMMARY.model_copy(update={"cost_usd": None}))
    assert "unknown on spot" in text
    assert "less" not in text


def test_a_completion_that_differs_is_not_hidden() -> None:
    text = shown(SUMMARY.model_copy(update={"completion_matches_transformers": False}))
    assert "NO" in text


def test_an_earlier_demo_is_replaced_and_its_data_kept(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    with _claimed(out) as folder:
        (folder / "data").mkdir()
        (folder / "runs").mkdir()
        (folder / "summary.json").write_text("{}")
    with _claimed(out) as folder:
        assert {path.name for path in folder.iterdir()} == {"data", ".ebbtide-demo"}


def test_other_data_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(AlreadyExists, match="holds other data"), _claimed(tmp_path):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        _claimed(tmp_path / "demo"),
        pytest.raises(AlreadyExists, match="another demo"),
        _claimed(tmp_path / "demo"),
    ):
        pass


def test_a_command_that_fails_ends_the_demo_with_its_exit_code() -> None:
    with (
        Shell(Console(file=StringIO()), {}) as shell,
        pytest.raises(EbbtideError, match="cost .*exit code 10"),
    ):
        shell.run("cost", "no-such-run")


def test_a_command_that_still_runs_is_ended_with_the_shell() -> None:
    with Shell(Console(file=StringIO()), {}) as shell:
        process = shell.start("data", "prepare", "/dev/stdin", "--out", "never")
        assert process.poll() is None
    assert process.returncode is not None


def processes_with(marker: str) -> list[int]:
    """Live processes whose environment holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:  # ended meanwhile
                continue
            if marker.encode() in environment and not zombie:
                found.append(int(entry.name))
    return found


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "ending"),
    [
        ("start a Ray cluster", signal.SIGTERM),
        ("$ ebbtide data prepare", signal.SIGINT),
    ],
)
def test_an_interrupted_demo_leaves_no_process(
    tmp_path: Path, moment: str, ending: signal.Signals
) -> None:
    marker = f"EBBTIDE_TEST_MARKER={tmp_path}"
    name, _, value = marker.partition("=")
    demo = subprocess.Popen(
        [sys.executable, "-m", "ebbtide", "demo", "--out", str(tmp_path / "demo")],
        env={**os.environ, name: value},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert demo.stderr is not None
    try:
        for line in demo.stderr:
            if moment in line:
                break
        assert processes_with(marker)
        demo.send_signal(ending)
        assert demo.wait(120) == 128 + ending
    finally:
        demo.kill()
        demo.stderr.close()
    deadline_s = time.monotonic() + 30
    while (left := processes_with(marker)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert left == []
    assert not list((tmp_path / "demo").glob("summary.json"))
