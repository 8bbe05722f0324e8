from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.report import Mark, label_levels, loss_curve_png, running_mean


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file, in pixels."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_run_with_everything_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "loss.png"
    loss_curve_png(
        path,
        list(range(1, 101)),
        [9 - step / 20 for step in range(100)],
        marks=[Mark(30, "notice"), Mark(33, "kill"), Mark(97, "growth", "two nodes added")],
        validation=[(50, 6.5), (100, 4.1)],
        world_sizes=[(0, 4), (30, 3), (33, 2), (31, 1), (97, 4)],
        reference=("unigram entropy", 6.1),
        title="a run",
    )
    width, height = size_of(path)
    assert width > 1000
    assert height > 600


def test_a_run_of_no_step_is_drawn(tmp_path: Path) -> None:
    loss_curve_png(tmp_path / "loss.png", [], [])
    assert size_of(tmp_path / "loss.png")[0] > 0


def test_the_running_mean_keeps_lines_straight_to_their_ends() -> None:
    values = [float(n) for n in range(200)]
    assert running_mean(values) == pytest.approx(values)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.3)), max_size=12))
def test_labels_never_touch(labels: list[tuple[float, float]]) -> None:
    spans = [(start, start + width) for start, width in sorted(labels)]
    placed = list(zip(label_levels(spans), spans, strict=True))
    for index, (level, (start, end)) in enumerate(placed):
        for other_level, (other_start, other_end) in placed[:index]:
            assert level != other_level or end < other_start or start > other_end
