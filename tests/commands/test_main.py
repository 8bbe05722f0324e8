"""The command line as a whole: every command is there, and costs what it needs."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from ebbtide.__main__ import app

IMPORTED = """\
import sys
from ebbtide.__main__ import app
app(["tune", "pool", "status", "--help"], standalone_mode=False)
print(*(name for name in sys.modules if name.startswith("ebbtide.commands.")))
"""


def test_every_command_is_listed() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    for name in ("agent", "checkpoints", "data", "plan", "serve", "train", "tune"):
        assert f" {name} " in listed


def test_what_is_near_a_mistyped_command_is_told() -> None:
    found = CliRunner().invoke(app, ["trian"])
    assert found.exit_code == 2 and "Did you mean 'train'" in found.output


def test_a_command_imports_no_other() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED], stdout=subprocess.PIPE, text=True, check=True
    )
    assert run.stdout.splitlines()[-1].split() == [
        "ebbtide.commands.stdout",
        "ebbtide.commands.tune",
    ]
