"""What a sweep leaves for others to read: JSON, its trials and reports as Parquet, and a page."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import Any

from ebbtide.platform.storage import Storage
from ebbtide.tune.results import SweepResult

RESULTS = "results.json"
TRIALS, REPORTS, PAGE = "trials.parquet", "reports.parquet", "report.html"


def write(storage: Storage, result: SweepResult) -> None:
    """Put the results beside the sweep's own files, those that others wait for last."""
    for name, content in files(result).items():
        storage.put(name, content)
    storage.put(RESULTS, json.dumps(result.document(), indent=1).encode())


def files(result: SweepResult) -> dict[str, bytes]:
    """The content of each file by its name."""
    from ebbtide.tune.page import page

    return {
        TRIALS: parquet(trial_rows(result)),
        REPORTS: parquet(report_rows(result)),
        PAGE: page(result).encode(),
    }


def trial_rows(result: SweepResult) -> list[dict[str, Any]]:
    """One row a trial; its values are the columns ``value.KEY``."""
    return [
        {
            "number": trial.number,
            "trial_id": trial.trial_id,
            "status": trial.status,
            "is_best": trial is result.best,
            result.metric: trial.metric,
            "reason": trial.reason,
            "tries": trial.tries,
            "started_at_s": trial.started_at_s,
            "seconds": trial.seconds,
            "usd": None if trial.usd is None else float(trial.usd),
            **{f"value.{key}": value for key, value in trial.values.items()},
        }
        for trial in result.trials
    ]


def report_rows(result: SweepResult) -> list[dict[str, Any]]:
    """One row a report, in the order of trials and steps; the metrics are the columns."""
    return [
        {"number": trial.number, **report} for trial in result.trials for report in trial.reports
    ]


def parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    """The rows as a Parquet file. A column of values of several kinds holds their JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def _column(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return (
            [float(value) if value is not None else None for value in values]
            if (float in kinds)
            else values
        )
    if len(kinds) == 1 and kinds <= {bool, str}:
        return values
    return [None if value is None else _json(value) for value in values]


def _json(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, default=str)
