from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.platform.errors import DataError
from ebbtide.platform.market.traces import Trace, align, read_sets, read_trace


def write(path: Path, **changes: Any) -> Path:
    document = {"metadata": {"gap_seconds": 600}, "data": [1, 0, 2], **changes}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_a_trace_is_read_as_it_stands(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "us-east-1a_v100_1.json", prices=[1.5, 2.0, 1.25]))
    assert (trace.zone, trace.tick_s, trace.duration_s) == ("us-east-1a_v100_1", 600, 1800)
    assert trace.nodes.tolist() == [1, 0, 2]
    assert trace.usd_per_hour is not None
    assert trace.usd_per_hour.tolist() == [1.5, 2.0, 1.25]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metadata": {}}, "gap_seconds"),
        ({"metadata": {"gap_seconds": 0}}, "gap_seconds"),
        ({"metadata": {"gap_seconds": True}}, "gap_seconds"),
        ({"metadata": {"gap_seconds": 1e300}}, "gap_seconds"),
        ({"metadata": None}, "metadata"),
        ({"data": []}, "data"),
        ({"data": [1, -1]}, r"data\[1\]"),
        ({"data": [1, "1"]}, r"data\[1\]"),
        ({"data": [0.5]}, r"data\[0\]"),
        ({"data": [1e300]}, r"data\[0\]"),
        ({"prices": [1.0]}, "as long as data"),
        ({"prices": [1.0, 0, 1.0]}, r"prices\[1\]"),
        ({"prices": [1.0, 1e300, 1.0]}, r"prices\[1\]"),
        ({"prices": [1.0, float("nan"), 1.0]}, r"prices\[1\]"),
    ],
)
def test_what_is_no_trace_is_refused_with_file_and_reason(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "zone.json", **changes)
    with pytest.raises(DataError, match=f"zone.json.*{said}"):
        read_trace(path)


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zone.json").write_text("{")
    with pytest.raises(DataError, match="not a readable JSON file"):
        read_trace(tmp_path / "zone.json")


def test_a_folder_is_a_set_and_named_by_what_tells_it_apart(tmp_path: Path) -> None:
    for folder, zone in (("x/aws", "b"), ("x/aws", "a"), ("x/gcp", "c")):
        write(tmp_path / folder / f"{zone}.json")
    sets = read_sets([tmp_path])
    assert {name: [t.zone for t in traces] for name, traces in sets.items()} == {
        "aws": ["a", "b"],
        "gcp": ["c"],
    }
    assert list(read_sets([tmp_path / "x" / "aws"])) == ["aws"]
    assert list(read_sets([tmp_path / "x" / "aws" / "a.json"])) == ["aws"]


def test_a_path_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_sets([tmp_path / "none"])
    with pytest.raises(DataError, match="holds no trace"):
        read_sets([tmp_path])


def test_joined_ticks_hold_the_least_of_their_parts() -> None:
    trace = Trace("a", 30.0, np.array([2, 2, 1, 2, 0, 2, 2]), np.array([1.0, 3, 1, 1, 2, 4, 9]))
    joined = trace.resample(60)
    assert joined.tick_s == 60
    assert joined.nodes.tolist() == [2, 1, 0]  # the odd tick at the end is left out
    assert joined.usd_per_hour is not None
    assert joined.usd_per_hour.tolist() == [2, 1, 3]


def test_long_ticks_are_repeated() -> None:
    parts = Trace("a", 600.0, np.array([1, 0])).resample(195)
    assert parts.tick_s == 200
    assert parts.nodes.tolist() == [1, 1, 1, 0, 0, 0]


def test_zones_of_a_set_get_one_tick_and_length() -> None:
    short = Trace("a", 600.0, np.array([1, 0]))
    fine = Trace("b", 200.0, np.array([1, 1, 1, 0]))
    aligned = align([short, fine], 200)
    assert [(len(t.nodes), t.tick_s) for t in aligned] == [(4, 200), (4, 200)]


def test_ticks_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(DataError, match="a 200 s, b 170 s"):
        align([Trace("a", 200.0, np.ones(9, int)), Trace("b", 170.0, np.ones(9, int))], 180)
