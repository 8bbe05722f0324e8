"""What a cloud's notice means, and when to ask for the next: decisions only.

What acts on them is :mod:`ebbtide.platform.node_watch`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ebbtide.platform.errors import MetadataError
from ebbtide.platform.metadata_service import Cloud

POLL_S = 5.0  # as AWS recommends
_RETRY_S = 1.0
_TOLERANCE_S = 600.0  # time zones are a quarter of an hour apart at least
_LEAD_S: Mapping[Cloud, float] = {"aws": 120.0, "gcp": 30.0}
_ACTIONS = ("terminate", "stop", "hibernate")


@dataclass(frozen=True)
class Notice:
    """``doubt`` says why ``deadline_s`` (epoch seconds) is not the time that the cloud gave."""

    action: str
    deadline_s: float
    doubt: str | None = None


def read_notice(cloud: Cloud, text: str, now_s: float) -> Notice:
    """What a cloud's notice means. Raises MetadataError if it is none.

    A time that cannot be right (written in another time zone, or by a clock that is wrong) is
    replaced by the lead that the cloud promises; one that is just over means now.
    """
    if cloud == "gcp":
        if text.upper() != "TRUE":
            raise MetadataError(f"GCP: {text[:100]!r} is neither TRUE nor FALSE")
        return Notice("preempt", now_s + _LEAD_S[cloud])
    notice = _mapping(text, "instance-action")
    action = notice.get("action")
    if action not in _ACTIONS:
        raise MetadataError(f"AWS: instance-action has no known action: {text[:200]!r}")
    if action == "hibernate":
        return Notice(action, now_s)  # it begins at once
    try:
        given_s = _time_s(notice.get("time"))
    except MetadataError as error:
        return Notice(action, now_s + _LEAD_S[cloud], str(error))
    if abs(given_s - now_s) > _TOLERANCE_S:
        doubt = f"{notice['time']} is {given_s - now_s:+.0f} s from this machine's clock"
        return Notice(action, now_s + _LEAD_S[cloud], doubt)
    return Notice(action, max(given_s, now_s))


def read_rebalance(text: str) -> float:
    """Since when AWS recommends to leave, in epoch seconds. Raises MetadataError."""
    return _time_s(_mapping(text, "rebalance").get("noticeTime"))


def next_poll_s(took_s: float, pending: bool) -> float:
    """How long to wait before asking again, after asking (and waiting) took so long.

    A long poll that was answered late is followed at once; one that was not waited for is not.
    """
    return _RETRY_S if pending else max(0.0, POLL_S - took_s)


def _mapping(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise MetadataError(f"AWS: {what} is not a JSON object: {text[:200]!r}")
    return value


def _time_s(text: object) -> float:
    """Epoch seconds of an ISO 8601 time; one without a zone is UTC, as documented."""
    try:
        time = datetime.fromisoformat(str(text))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise MetadataError(f"AWS: {str(text)[:100]!r} is not a time") from error
