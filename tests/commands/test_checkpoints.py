"""``ebbtide checkpoints`` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ebbtide.__main__ import app
from ebbtide.platform.checksums import sha256
from ebbtide.platform.errors import CheckpointError
from ebbtide.platform.storage import open_storage
from ebbtide.train import manifest
from ebbtide.train.manifest import CheckpointManifest, FileEntry


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose steps 1 and 2 are complete, and of whose step 3 there is a shard."""
    storage = open_storage(str(tmp_path))
    for step, loss in ((1, 1.5), (2, 2.5)):
        checkpoint = storage.child(manifest.checkpoint_key(step, "aa"))
        data = b"tensor %d" % step
        checkpoint.put("__0_0.distcp", data)
        file = FileEntry(key="__0_0.distcp", size_bytes=8, sha256=sha256(data))
        manifest.put_part(checkpoint, 0, [file])
        manifest.commit(
            checkpoint,
            CheckpointManifest(
                run="r",
                step=step,
                time_s=1e9,
                world_size=1,
                config_sha256="",
                dataset_sha256="",
                tokens_seen=10,
                validation_loss=loss,
                fingerprint={},
                files=(),
            ),
        )
    storage.put(f"{manifest.checkpoint_key(3, 'bb')}/__0_0.distcp", b"tensor 3")
    return tmp_path


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)])


def test_it_lists_newest_first(run: Path) -> None:
    document = json.loads(invoke(run, "--json").stdout)
    assert document["newest"] == "step-00000002-aa"
    listed = [(c["step"], c["state"]) for c in document["checkpoints"]]
    assert listed == [(3, "incomplete"), (2, "complete"), (1, "complete")]
    assert document["checkpoints"][1]["validation_loss"] == 2.5
    assert [c["pinned"] for c in document["checkpoints"]] == [None, None, "best"]
    table = invoke(run)
    assert table.exit_code == 0
    assert "step-00000002-aa" in table.stdout
    assert "step-00000001-aa  pinned (best)" in table.stdout
    assert "step-00000003-bb is incomplete: has no manifest.json" in table.stdout


def test_a_person_pins_and_unpins(run: Path) -> None:
    def pinned(*arguments: Any) -> list[str | None]:
        document = json.loads(invoke(run, "--json", *arguments).stdout)
        return [c["pinned"] for c in document["checkpoints"]]

    assert pinned("--pin", 2) == [None, "user", "best"]
    assert pinned() == [None, "user", "best"]
    assert pinned("--unpin", 2) == [None, None, "best"]
    refused = invoke(run, "--pin", 3)
    assert isinstance(refused.exception, CheckpointError)
    assert "no complete checkpoint of step 3; there are 2, 1" in str(refused.exception)


def test_verify_reads_every_byte(run: Path) -> None:
    assert invoke(run, "--verify").exit_code == 0
    (run / "checkpoints" / "step-00000002-aa" / "__0_0.distcp").write_bytes(b"tensor X")
    assert invoke(run).exit_code == 0
    verified = invoke(run, "--verify", "--json")
    assert json.loads(verified.stdout)["newest"] == "step-00000001-aa"
    assert isinstance(verified.exception, CheckpointError)
    assert "step-00000002-aa: __0_0.distcp" in str(verified.exception)


def test_a_run_without_any(tmp_path: Path) -> None:
    result = invoke(tmp_path / "nothing")
    assert isinstance(result.exception, CheckpointError)
    assert not (tmp_path / "nothing").exists()
