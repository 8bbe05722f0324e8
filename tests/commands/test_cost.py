from __future__ import annotations

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from ebbtide.platform.errors import CostError
from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.meter import Owner
from ebbtide.platform.prices import Market
from ebbtide.platform.records import (
    Attempt,
    Finished,
    NodeDown,
    NodeUp,
    SaveMissed,
    Served,
    Span,
)
from ebbtide.platform.storage import LocalStorage

T = 1_700_000_000.0


def ebbtide(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ebbtide", *arguments],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two attempts on a spot node at $1.20 and one of unknown price: 600 s and 60 s."""
    path = tmp_path / "runs" / "demo"
    with LedgerWriter(LocalStorage(path)) as writer:
        for node_id, usd in (("a", Decimal("1.20")), ("b", None)):
            writer.write(
                NodeUp(
                    node_id=node_id,
                    time_s=T,
                    instance_type="box",
                    market=Market.SPOT,
                    usd_per_hour=usd,
                    usd_per_hour_on_demand=usd and 3 * usd,
                )
            )
        writer.write(NodeDown(node_id="b", time_s=T + 60))
        for index, first_step in enumerate((0, 20)):
            start_s = T + 300 * index
            writer.write(Attempt(index=index, start_s=start_s, first_step=first_step))
            writer.write(
                Span(
                    node_id="a",
                    attempt=index,
                    start_s=start_s,
                    end_s=start_s + 300,
                    seconds={Owner.COMPUTE: 270, Owner.DATA_STALL: 30},
                    first_step=30 * index + 1,
                    last_step=30 * index + 30,
                )
            )
        for why in ("left out", "failed", "left out"):
            writer.write(SaveMissed(time_s=T + 100, attempt=0, step=9, why=why))
        writer.write(Finished(time_s=T + 600, status="finished"))
    return path


def test_json_has_exact_figures(run: Path) -> None:
    result = ebbtide("cost", "demo", "--storage", str(run.parent), "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["status"], document["node_seconds"]) == ("finished", 660)
    assert (document["cost_usd"], document["partial"]) == (0.2, True)
    assert document["cost_on_demand_usd"] == 0.6
    owners = {name: part["node_seconds"] for name, part in document["owners"].items()}
    assert owners == {
        "compute": 270 * 2 / 3 + 270,
        "data_stall": 30 * 2 / 3 + 30,
        "network_stall": 0,
        "checkpoint_stall": 0,
        "restart": 0,
        "lost_work": 100,
        "validation": 0,
        "idle": 60,
    }
    assert document["goodput"] == pytest.approx(450 / 660)
    assert [part["node_seconds"] for part in document["attempts"]] == [360, 300]
    assert [(n["node_id"], n["usd_per_hour"], n["cost_usd"]) for n in document["nodes"]] == [
        ("a", "1.20", 0.2),
        ("b", None, None),
    ]
    assert document["saves_missed"] == {"left out": 2, "failed": 1}
    assert document["ledger_faults"] == []


def test_tables_show_it_and_a_damaged_line_is_said_not_fatal(run: Path) -> None:
    LocalStorage(run).put("ledger/torn-000000.jsonl", b'{"kind":"no')
    result = ebbtide("cost", str(run))
    assert result.returncode == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert "lost work 100.0 15.2 $0.0333" in shown
    assert "idle 60.0 9.1 unknown unknown" in shown
    assert "total 660.0 100.0 $0.2000 (partial) $0.6000 (partial)" in shown
    assert "60.0 node-seconds have no known price" in shown
    assert "checkpoints that came to nothing: 1 failed, 2 left out" in shown
    assert "1 ledger lines could not be read" in result.stderr
    assert "torn-000000.jsonl:1" in result.stderr


def test_the_real_cost_has_network_storage_and_engineers(run: Path) -> None:
    rates = ("--network-factor=0.2", "--engineering-usd-per-hour=90", "--engineering-hours=2")
    result = ebbtide("cost", str(run), "--json", *rates)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)["real_cost"]
    assert (found["nodes_usd"], found["network_usd"]) == (0.2, 0.04)
    assert (found["engineering_usd"], found["total_usd"]) == (180.0, 180.24)
    result = ebbtide("cost", str(run), *rates)
    assert found["partial"]  # one of the nodes has no price
    sums = "real cost $180.24 (partial): $0.20 of nodes + $0.04 network + $180.00 eng"
    assert sums in result.stdout
    for wrong in (
        "--network-factor=-1",
        "--network-factor=nan",
        "--network-factor=much",
        "--network-factor=1e30",
        "--engineering-hours=2",
        "--csv --network-factor=0.2",
    ):
        assert ebbtide("cost", str(run), *wrong.split()).returncode == 2


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    result = ebbtide("cost", "nothing", "--storage", str(tmp_path))
    assert result.returncode == 10
    assert result.stdout == ""
    assert f"{tmp_path}/nothing/ledger: no ledger here" in result.stderr


def test_a_ledger_of_which_nothing_can_be_read(tmp_path: Path) -> None:
    LocalStorage(tmp_path).put("ledger/w-000000.jsonl", b"\xff\xff")
    result = ebbtide("cost", str(tmp_path), "--json")
    assert result.returncode == 10
    assert "the first is ledger/w-000000.jsonl, line 1: " in " ".join(result.stderr.split())
    assert "LedgerFault" not in result.stderr


def test_an_endpoints_ledger_has_its_keys_and_the_price_of_a_million_tokens(tmp_path: Path) -> None:
    path = tmp_path / "endpoint"
    with LedgerWriter(LocalStorage(path)) as writer:
        for node_id in ("decode-1", "prefill-1"):
            writer.write(
                NodeUp(
                    node_id=node_id,
                    time_s=T,
                    instance_type=node_id[:-2],
                    market=Market.ON_DEMAND,
                    usd_per_hour=Decimal("3.60"),
                    usd_per_hour_on_demand=Decimal("3.60"),
                )
            )
        busy = {Owner.COMPUTE: 400.0, Owner.IDLE: 600.0}
        writer.write(Span(node_id="decode-1", attempt=0, start_s=T, end_s=T + 1000, seconds=busy))
        for key, prompt_tokens in (("alice", 300_000), ("bob", 50_000), ("alice", 100_000)):
            writer.write(
                Served(
                    time_s=T + 500,
                    key=key,
                    requests=10,
                    prompt_tokens=prompt_tokens,
                    output_tokens=25_000,
                    decode_s=20,
                )
            )
        writer.write(Finished(time_s=T + 1000, status="stopped"))
    document = json.loads(ebbtide("cost", str(path), "--json").stdout)
    assert (document["cost_usd"], document["tokens"]) == (2.0, 525_000)
    assert document["usd_per_million_tokens"] == pytest.approx(2 / 0.525, rel=1e-6)
    alice, bob = document["keys"]
    assert (alice["key"], alice["requests"], alice["prompt_tokens"]) == ("alice", 20, 400_000)
    assert (alice["output_tokens"], alice["decode_s"]) == (50_000, 40)
    assert alice["cost_usd"] + bob["cost_usd"] == pytest.approx(2.0)
    assert bob["cost_usd"] == pytest.approx(2.0 * 75 / 525)
    shown = ebbtide("cost", str(path)).stdout
    for words in ("By key", "alice", "400,000", "2.000", "over the 525,000 of prompts and answers"):
        assert words in shown, words
    assert "goodput 20.0% of node time (with requests at work)" in shown
    assert "…" not in shown
    refused = ebbtide("report", str(path))
    assert refused.returncode == CostError.exit_code
    assert "is an endpoint's; `ebbtide cost` shows it by key" in refused.stderr
    (listed,) = json.loads(
        ebbtide("cost", "--all", "--storage", str(path.parent), "--json").stdout
    )["runs"]
    assert listed["usd_per_million_tokens"] == document["usd_per_million_tokens"]
