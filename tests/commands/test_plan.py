"""``ebbtide plan serve`` reads a model's configuration, and says what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ebbtide.commands.plan import app
from ebbtide.platform.errors import ConfigError
from tests.serve.test_plan import LLAMA_8B

RUN = CliRunner()


def write(folder: Path, manifest: bool = True) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    if manifest:
        (folder / "ebbtide.json").write_text(json.dumps({"parameters": 8_030_000_000}))
    return folder


def test_every_kind_of_hardware_has_its_rows(tmp_path: Path) -> None:
    done = RUN.invoke(app, ["serve", str(write(tmp_path)), "--json"])
    rows = json.loads(done.stdout)
    assert {"L4", "L20", "L40S", "MI300X", "H200", "CPU"} <= {row["hardware"] for row in rows}
    priced = [row for row in rows if row["usd_per_million_tokens"] is not None]
    assert {"L4", "H100", "A100-80GB"} <= {row["hardware"] for row in priced}
    text = RUN.invoke(app, ["serve", str(tmp_path)], env={"COLUMNS": "160"}).stdout
    assert "unknown" in text and "not measured" in text


def test_the_number_of_parameters_can_be_given(tmp_path: Path) -> None:
    folder = write(tmp_path, manifest=False)
    done = RUN.invoke(app, ["serve", str(folder / "config.json"), "--json", "--parameters", "8e9"])
    assert json.loads(done.stdout)
    refused = RUN.invoke(app, ["serve", str(folder)])
    assert isinstance(refused.exception, ConfigError) and "--parameters" in str(refused.exception)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "mamba"}'])
def test_what_is_no_decoder_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = RUN.invoke(app, ["serve", str(tmp_path)])
    assert isinstance(done.exception, ConfigError) and "config.json" in str(done.exception)
