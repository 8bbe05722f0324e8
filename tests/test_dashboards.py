"""The dashboards in ``grafana/``: importable, and made of metrics that exist.

That every one of their expressions shows something of a real run is seen in
``tests/commands/test_paused.py``, with a real Prometheus.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ebbtide.platform.metrics import METRICS, PREFIX, RUN

FOLDER = Path(__file__).parents[1] / "grafana"
_METRIC = re.compile(r"\bray_\w+")
_LABELS = re.compile(r"\b(?:by|without) \(([^)]*)\)|(\w+)=~?\"|\{\{(\w+)\}\}")


def boards() -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def expressions(run: str) -> list[tuple[str, str]]:
    """Every panel's expressions for a run, with the dashboard's name."""
    return [
        (name, target["expr"].replace("$run", run))
        for name, board in boards().items()
        for panel in board["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.parametrize("name", sorted(boards()))
def test_a_dashboard_is_whole(name: str) -> None:
    board = boards()[name]
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board)))
    assert used == variables, "a variable is not defined, or not used"
    assert all(panel["title"] and panel["description"] for panel in panels)


def test_every_expression_names_metrics_and_labels_that_exist() -> None:
    known = {f"ray_{PREFIX}{name}": {RUN, *metric.labels} for name, metric in METRICS.items()}
    shown = set()
    for name, board in boards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                expression = target["expr"]
                used = set(_METRIC.findall(expression))
                assert used and used <= known.keys(), f"{name}, {panel['title']}: {expression}"
                shown |= used
                text = f"{expression} {target['legendFormat']}"
                labels = {
                    label.strip()
                    for found in _LABELS.findall(text)
                    for label in ",".join(found).split(",")
                    if label.strip()
                }
                allowed = set.union(*(known[metric] for metric in used))
                assert labels <= allowed, f"{name}, {panel['title']}: {labels - allowed}"
    assert shown == known.keys()
