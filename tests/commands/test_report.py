"""``ebbtide report`` as it is typed, on a run with everything in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet
import pytest

from ebbtide.commands import cost as cost_command
from ebbtide.commands.report import report
from ebbtide.platform.charts import bar_chart, ticks
from ebbtide.platform.errors import CostError
from ebbtide.platform.ledger import LedgerWriter
from ebbtide.platform.records import Epoch
from ebbtide.platform.storage import LocalStorage
from ebbtide.train.events import (
    Event,
    EventLog,
    Failed,
    GenerationBegan,
    LeaveAsked,
    Left,
    MarketChange,
    NodeLost,
    Notice,
    Started,
    Validation,
)
from tests.commands.test_cost import T, ebbtide, run
from tests.train.test_events import step

__all__ = ["run"]


class Page(HTMLParser):
    """What a page holds: its tags, texts and attributes; unbalanced tags fail."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def write_events(path: Path) -> None:
    events: list[Event] = [
        Started(time_s=T, steps=60),
        GenerationBegan(time_s=T + 1, attempt=0, world_size=2, nodes=("a", "b")),
        *(step(n, 0, loss=8 - n / 20, time_s=T + 9 * n) for n in range(1, 31)),
        Notice(time_s=T + 280, node="a<script>", deadline_s=None),
        LeaveAsked(time_s=T + 281, attempt=0, reason="notice: a"),
        Left(time_s=T + 290, attempt=0, step=30),
        NodeLost(time_s=T + 291, node="b", announced=False),
        Failed(time_s=T + 292, attempt=0, cause="crash", message="", counted=True),
        GenerationBegan(time_s=T + 300, attempt=1, world_size=1, nodes=("a",)),
        *(step(n, 1, loss=8 - n / 20, time_s=T + 300 + 9 * (n - 20)) for n in range(21, 51)),
        Validation(time_s=T + 590, attempt=1, step=50, loss=5.4),
        MarketChange(time_s=T + 591, market="on_demand", zone=None, reason="tide: <late>"),
        LeaveAsked(time_s=T + 592, attempt=1, reason="market: tide: <late>"),
    ]
    with EventLog(LocalStorage(path), 0) as log:
        log.write(events)
    with LedgerWriter(LocalStorage(path)) as ledger:
        ledger.write(Epoch(index=0, start_s=T))
        ledger.write(Epoch(index=1, start_s=T + 300))


def test_a_run_on_one_page_that_loads_nothing(run: Path, tmp_path: Path) -> None:
    write_events(run)
    out = tmp_path / "pages" / "run.html"
    done = ebbtide("report", "demo", "--storage", str(run.parent), "--out", str(out))
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    text = out.read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [v for name, v in page.attributes if name in ("src", "href", "xlink:href")]
    assert not re.search(r"https?:|url\(|@import", text)
    assert page.tags.count("svg") == 4
    shown = page.text
    assert "cost $0.2000 (partial)" in shown
    assert "goodput 68.2%" in shown
    assert "lost work 15%: $0.0333; steps were made twice" in shown
    assert "idle 9%: unknown; nodes are paid for" in shown
    assert "notice a<script" in shown
    assert "node lost b" in shown
    assert "epoch 0" in shown
    assert "epoch 1" in shown
    assert "validation 5.4000 at 50" in shown
    assert "2023-11-14 22:23:11Z on-demand tide: <late>" in shown
    numbers = [float(v) for name, v in page.attributes if name in ("x", "y", "x1", "cx", "height")]
    assert all(-1 <= number <= 860 for number in numbers)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_a_browser_without_a_network_shows_the_page(run: Path, tmp_path: Path) -> None:
    write_events(run)
    out = tmp_path / "page.html"
    report(str(run), None, out)
    done = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--host-rules=MAP * ~"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", out.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    page = Page(done.stdout.replace("<!DOCTYPE html>", ""))
    assert page.tags.count("svg") == 4
    assert page.text == Page(out.read_text()).text


def test_a_run_without_events_or_steps_has_a_page_too(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    report(str(run), None, out)
    assert "No step is known." in Page(out.read_text()).text
    with LedgerWriter(LocalStorage(tmp_path / "empty")) as writer:
        writer.flush()
    report(str(tmp_path / "empty"), None, out)
    assert "Nothing: no part of the node time" in Page(out.read_text()).text
    with pytest.raises(CostError, match="no ledger here"):
        report(str(tmp_path / "nothing"), None, out)


def test_cost_by_epoch_per_token_without_stalls_and_as_csv(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_events(run)
    cost_command.cost(str(run), None, False, False, False, None, "0", "0", "0", "0")
    shown = " ".join(capsys.readouterr().out.split())
    assert "By epoch" in shown
    assert "1 300.0 45.5 $0.1000 $0.3000 By instance type" in shown
    assert "$31.25 per 1M tokens (partial), over the 6,400 of kept steps" in shown

    table = tmp_path / "tables" / "rows.parquet"
    cost_command.cost(str(run), None, False, False, True, table, "0", "0", "0", "0")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("run,node_id,instance_type,market,zone,attempt,epoch,owner,")
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert sum(float(row["node_seconds"]) for row in rows) == 660
    assert sum(float(row["cost_usd"] or 0) for row in rows) == pytest.approx(0.2)
    assert {row["usd_per_hour"] for row in rows if row["node_id"] == "b"} == {""}

    columns = pyarrow.parquet.read_table(table).to_pydict()
    assert sum(columns["node_seconds"]) == 660
    known = [usd for usd in columns["cost_usd"] if usd is not None]
    assert abs(sum(known) - Decimal("0.2")) < Decimal("1e-11")
    assert len(known) < len(columns["cost_usd"]) == len(rows)
    assert set(columns["epoch"]) == {0, 1}


def test_cost_of_all_runs_under_a_storage(run: Path) -> None:
    with LedgerWriter(LocalStorage(run.parent / "team" / "other")) as writer:
        writer.flush()
    done = ebbtide("cost", "--all", "--storage", str(run.parent))
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "demo finished 660.0 100.0 $0.2000 (partial) $0.6000 (partial) 68.2" in shown
    assert "team/other" in shown
    assert ebbtide("cost").returncode == 2
    assert ebbtide("cost", "--all").returncode == 2


def test_of_many_epochs_only_some_are_labelled() -> None:
    page = Page(bar_chart([(f"epoch {n}", n, f"${n}") for n in range(100)], y_label="dollars"))
    assert page.tags.count("rect") == 100
    assert sum(text.startswith("epoch") and ":" not in text for text in page.texts) == 8


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(3.2, 8.9) == [4, 6, 8]
    assert ticks(0, 0.00009) == [0, 2e-05, 4e-05, 6e-05, 8e-05]
    assert ticks(5, 5) == [5]
