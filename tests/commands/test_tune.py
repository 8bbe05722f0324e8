"""``ebbtide tune`` as it is typed; what sweeps do is tested in tests/tune."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ebbtide.commands import tune as command
from ebbtide.platform.errors import ConfigError
from ebbtide.tune.results import SweepResult, Trial

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--help"], "evaluate CHECKPOINT"),
        (["run", "--help"], "Run a sweep"),
        (["sweep.yaml", "--help"], "--set"),
        (["pool", "--help"], "status"),
        (["pool", "down", "--help"], "End the evaluators"),
        (["evaluate", "--help"], "Score checkpoints"),
    ],
)
def test_help_with_an_example(arguments: list[str], wanted: str) -> None:
    result = runner.invoke(command.app, arguments)
    assert result.exit_code == 0 and wanted in result.output
    assert "Example" in result.output or arguments == ["pool", "--help"]


@pytest.mark.parametrize(
    "arguments", [["nowhere.yaml"], ["--json", "nowhere.yaml"], ["run", "nowhere.yaml"]]
)
def test_the_first_argument_is_a_file_unless_it_is_a_command(arguments: list[str]) -> None:
    result = runner.invoke(command.app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert "nowhere.yaml: cannot be read" in str(result.exception)


def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "tune.yaml"
    file.write_text("base: b.yaml\nnum_samples: 2\nspace: {optimizer.lrr: {uniform: [0, 1]}}\n")
    result = runner.invoke(command.app, [str(file)])
    assert isinstance(result.exception, ConfigError)
    assert f"{file}:3: space.optimizer.lrr" in str(result.exception)
    assert "did you mean optimizer.lr?" in str(result.exception)


def test_the_table_shows_the_best_and_why_the_others_failed() -> None:
    good = Trial(1, "a", {"optimizer.lr": 0.001}, "finished", 5.25, reports=[{"step": 15.0}])
    bad = Trial(2, "b", {"optimizer.lr": 1e30}, "failed", reason="step 3: the loss is not finite")
    result = SweepResult("s", "runs/s", "validation_loss", "min", "finished", (good, bad), 9.0, 0.5)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(command.results_table(result))
    text = capture.get()
    assert "finished, best" in text and "5.25" in text and "0.001" in text
    assert "failed: step 3: the loss is not finite" in text
    took, page, best = command.closing_lines(result, is_job=True)
    assert took == "took 9.0 s, cost unknown; 0 s of start-up not paid"
    assert page == "page: runs/s/report.html" and best.startswith("best: ebbtide train ")
    limited = replace(result, limit="max_seconds (9 s) is spent", usd=Decimal("0.25"))
    early, took, *_ = command.closing_lines(limited, is_job=False)
    assert early == "ended early: max_seconds (9 s) is spent" and "cost $0.2500;" in took
