"""What a sweep leaves to be read: Parquet and the page."""

from __future__ import annotations

import io
import math
import re
from html.parser import HTMLParser

from pyarrow import parquet

from ebbtide.tune import output
from ebbtide.tune.page import Axis, page
from ebbtide.tune.results import SweepResult, Trial


def trial(number: int, values: dict[str, object], metric: float | None) -> Trial:
    reports = [{"step": float(step), "loss": 1 / step} for step in (1, 2)] if metric else []
    status = "finished" if metric is not None else "failed"
    reason = None if metric is not None else "ValueError: <b>&"
    return Trial(number, f"t{number}", values, status, metric, reason, reports=reports)  # type: ignore[arg-type]


RESULT = SweepResult(
    name="a <sweep>",
    uri="runs/s",
    metric="loss",
    mode="min",
    status="finished",
    trials=(
        trial(1, {"lr": 1e-4, "kind": "adam"}, 0.5),
        trial(2, {"lr": 1e-1, "kind": "sgd", "nested": [1, 2]}, 0.25),
        trial(3, {"lr": 1e-2, "kind": 7}, None),
    ),
    seconds=9.0,
    first_trial_s=0.1,
)


def test_every_trial_is_a_row_and_every_report() -> None:
    found = output.files(RESULT)
    rows = parquet.read_table(io.BytesIO(found["trials.parquet"])).to_pylist()
    assert [row["loss"] for row in rows] == [0.5, 0.25, None]
    assert [row["value.lr"] for row in rows] == [1e-4, 1e-1, 1e-2]
    assert [row["value.kind"] for row in rows] == ['"adam"', '"sgd"', "7"]  # of several kinds
    assert [row["value.nested"] for row in rows] == [None, "[1, 2]", None]
    assert [row["is_best"] for row in rows] == [False, True, False]
    reports = parquet.read_table(io.BytesIO(found["reports.parquet"])).to_pylist()
    assert [(row["number"], row["step"]) for row in reports] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = page(RESULT)
    open_tags: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in ("meta", "line"):
                open_tags.append(tag)
            assert not {"src", "href"} & {name for name, _ in attrs}

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag, tag

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            pass

    Reader().feed(text)
    assert not open_tags
    assert "://" not in text and "a &lt;sweep&gt;" in text and "&lt;b&gt;&amp;" in text
    assert len(re.findall(r'<path class="t', text)) == 3 + 2  # coordinates and curves
    assert len(re.findall(r'<path class="t best"', text)) == 2
    assert "nan" not in text.lower().replace("nanum", "")


def test_a_page_without_a_result_is_a_page() -> None:
    empty = SweepResult("s", "u", "loss", "min", "interrupted", (), 1.0, None)
    assert "No trial has reported" in page(empty)


def test_axes_are_logarithmic_where_the_values_are() -> None:
    assert math.isclose(Axis.of([1e-4, 1e-2, 1e-3]).at(1e-3), 0.5)
    assert math.isclose(Axis.of([1.0, 2.0]).at(1.5), 0.5)
    assert Axis.of([0.0, 1e6]).at(5e5) == 0.5
    assert Axis.of([3, 3]).at(3) == 0.5
    assert [Axis.of(["a", "b", "c"]).at(name) for name in "abc"] == [0, 0.5, 1]
    assert Axis.of([True, False]).at(False) == 1
