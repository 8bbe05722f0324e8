"""``ebbtide serve``: a job file, or one of its commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbtide.__main__ import app
from ebbtide.platform.errors import ConfigError, ServeError
from ebbtide.serve import control


@pytest.mark.parametrize("before", [[], ["run"], ["--set", "http.port=1"]])
def test_what_names_no_command_is_a_job_file(before: list[str], tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["serve", *before, str(tmp_path / "nothing.yaml")])
    assert isinstance(found.exception, ConfigError)
    assert "nothing.yaml: cannot be read" in str(found.exception)


@pytest.mark.parametrize(("typed", "meant"), [("updat", "update"), ("chekc", "check")])
def test_a_command_that_is_nearly_one_is_not_a_job_file(typed: str, meant: str) -> None:
    found = CliRunner().invoke(app, ["serve", typed, "x"])
    assert found.exit_code == 2
    assert f"Did you mean '{meant}'?" in found.output


def test_its_help_names_all() -> None:
    found = CliRunner().invoke(app, ["serve", "-h"])
    assert found.exit_code == 0
    assert all(name in found.output for name in ("run", "check", "update"))


def test_an_update_needs_an_endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for place in ("_TEMPORARY", "_SESSIONS"):
        monkeypatch.setattr(control, place, tmp_path)
    found = CliRunner().invoke(app, ["serve", "update", "--model", "out"])
    assert isinstance(found.exception, ServeError)
    assert "no endpoint of yours runs on this machine" in str(found.exception)
