from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.policy import judge
from ebbtide.__main__ import app
from ebbtide.platform.errors import ConfigError, DataError
from ebbtide.platform.market.hazard import PRIOR_PER_HOUR, draw_series
from ebbtide.platform.market.traces import read_sets

SHORT = ["--work", "6", "--deadline", "8", "--windows", "3"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four zones of one set, 135 hours; in one of them up to four nodes."""
    folder = tmp_path_factory.mktemp("traces") / "aws-1"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for letter in "abcd":
        nodes = draw_series(PRIOR_PER_HOUR, 195.0, 2500, draw).astype(int)
        document = {
            "metadata": {"gap_seconds": 195},
            "data": (nodes * (4 if letter == "a" else 1)).tolist(),
        }
        (folder / f"us-x-1{letter}_v100_1.json").write_text(json.dumps(document))
    return folder


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_policies_stand_beside_the_optimum(traces: Path) -> None:
    policies = ("tide", "on_demand", "greedy", "spot_only", "uniform_progress_stay")
    asked = [part for name in policies for part in ("--policy", name)]
    document = json.loads(run(str(traces), *asked, *SHORT, "--json"))["sets"][0]
    assert len(document["zones"]) == 4
    assert list(document["policies"]) == list(policies)
    for name, row in document["policies"].items():
        assert row["over_optimum"] >= 0.999 or name == "spot_only"
        assert row["deadline_misses"] == 0 or name == "spot_only"
    assert document["policies"]["on_demand"]["usd"] == pytest.approx(6.217 * 3, rel=0.01)


def test_the_table_names_set_policies_and_optimum(traces: Path) -> None:
    output = run(str(traces), "--policy", "greedy", "--zone", "us-x-1b_v100_1", *SHORT)
    for text in ("aws-1", "us-x-1b_v100_1; 3 windows", "greedy", "(optimum)", "1.000"):
        assert text in output
    assert "us-x-1a" not in output


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_window_is_drawn(traces: Path, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"window.{ending}"
    run(str(traces), "--policy", "greedy", *SHORT, "--picture", str(picture))
    head = picture.read_bytes()[:200]
    assert (b"<svg" in picture.read_bytes()[:2000]) if ending == "svg" else head[1:4] == b"PNG"


def test_a_job_is_forecast(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "work_hours: 6\ndeadline_hours: 8\nrestart_hours: 0.2\non_demand_usd_per_hour: 3\n"
        "samples: 4\npolicies: [tide, on_demand]\n"
        "zones:\n  a: {hours_between_evictions: 5, hours_without_spot: 1, usd_per_hour: 1}\n"
    )
    output = run("--job", str(job))
    assert "best: tide in a" in output
    assert "less than on-demand ($18.60)" in output
    document = json.loads(run("--job", str(job), "--json"))
    assert document["best"]["policy"] == "tide"
    assert document["best"]["chance"] == 1.0
    assert document["on_demand"]["usd"]["median"] == pytest.approx(18.6)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ([], ConfigError, "TRACES"),
        (["{traces}", "--policy", "tyde"], ConfigError, "tyde: known are tide"),
        (["{traces}", "--policy", "price_pause"], ConfigError, "--pause-above"),
        (["{traces}", "--deadline", "48"], ConfigError, "not even on-demand"),
        (["{traces}", "--work", "nan"], ConfigError, "--work"),
        (["{traces}", "--restart", "1e-12"], ConfigError, "the most for a restart"),
        (["{traces}", "--deadline", "1e300"], ConfigError, "the most for a restart"),
        (["{traces}", "--picture", "{traces}"], ConfigError, "ends in .svg"),
        (["{traces}", "--spot", "0"], ConfigError, "--spot"),
        (["{traces}", "--work", "80", "--deadline", "90"], DataError, "no trace is long enough"),
        (["{traces}", "--zone", "us-y"], DataError, "no set has a zone named us-y"),
        (["{traces}/none"], DataError, "no such file"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    traces: Path, arguments: list[str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        run(*(part.format(traces=traces) for part in arguments))


def test_an_error_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ebbtide", "simulate", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 3
    assert "holds no trace" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_benchmark_gives_its_keys_and_the_same_figures_for_a_seed(traces: Path) -> None:
    sets = read_sets([traces])
    figures = judge(sets, seed=1, windows=1)
    for key in ("one_zone.0_9", "one_zone.0_8", "four_zones.0_9", "four_zones.0_8", "gang.0_8"):
        for policy in ("tide", "on_demand", "greedy", "uniform_progress"):
            assert figures[f"{policy}.{key}"] >= 1.0  # type: ignore[operator]  # a float
    assert figures["deadline_misses"] == 0
    assert figures["gang_spread"] is False
    assert any("0_7" in name for name in figures["too_short"])  # type: ignore[attr-defined]
    again = judge(sets, seed=1, windows=1)
    assert {**again, "seconds_per_1000_windows": 0} == {**figures, "seconds_per_1000_windows": 0}
