"""What a notice means, whatever the metadata service writes."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.errors import MetadataError
from ebbtide.platform.preemption import next_poll_s, read_notice, read_rebalance

NOW_S = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC).timestamp()


def aws(time: object, action: str = "terminate") -> str:
    return json.dumps({"action": action, "time": time})


@pytest.mark.parametrize("action", ["terminate", "stop"])
@pytest.mark.parametrize(
    "time", ["2026-03-01T12:02:00Z", "2026-03-01T13:02:00+01:00", "2026-03-01T12:02:00"]
)
def test_the_deadline_is_the_time_that_aws_gives(action: str, time: str) -> None:
    notice = read_notice("aws", aws(time, action), NOW_S)
    assert (notice.action, notice.deadline_s, notice.doubt) == (action, NOW_S + 120, None)


def test_a_hibernation_begins_at_once() -> None:
    assert read_notice("aws", aws("2026-03-01T12:02:00Z", "hibernate"), NOW_S).deadline_s == NOW_S


def test_gcp_leaves_thirty_seconds() -> None:
    notice = read_notice("gcp", "TRUE", NOW_S)
    assert (notice.action, notice.deadline_s) == ("preempt", NOW_S + 30)


def test_a_deadline_that_is_just_over_is_now() -> None:
    notice = read_notice("aws", aws("2026-03-01T11:59:10Z"), NOW_S)
    assert (notice.deadline_s, notice.doubt) == (NOW_S, None)


@pytest.mark.parametrize(
    ("time", "doubt"),
    [
        ("2026-03-01T14:02:00Z", "+7320 s from this machine's clock"),
        ("2026-03-01T07:02:00", "-17880 s from this machine's clock"),
        ("soon", "'soon' is not a time"),
        (None, "'None' is not a time"),
        ("0001-01-01T00:00:00+14:00", "-63908013600 s from this machine's clock"),
    ],
)
def test_a_time_that_cannot_be_right_is_replaced_by_the_promised_lead(
    time: object, doubt: str
) -> None:
    notice = read_notice("aws", aws(time), NOW_S)
    assert notice.deadline_s == NOW_S + 120
    assert notice.doubt is not None
    assert doubt in notice.doubt


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "<html>portal</html>",
        "{",
        "{}",
        aws("2026-03-01T12:02:00Z", "dance"),
        "[" * 9999,
    ],
)
def test_what_is_no_notice_drains_nothing(text: str) -> None:
    with pytest.raises(MetadataError, match="AWS: instance-action"):
        read_notice("aws", text, NOW_S)
    with pytest.raises(MetadataError, match="neither TRUE nor FALSE"):
        read_notice("gcp", text, NOW_S)


@given(st.text())
def test_any_text_is_a_notice_or_a_metadata_error(text: str) -> None:
    for body in (text, aws(text)):
        try:
            deadline_s = read_notice("aws", body, NOW_S).deadline_s
        except MetadataError:
            continue
        assert NOW_S <= deadline_s <= NOW_S + 600


@given(st.integers(-48, 56), st.integers(1, 120))
def test_a_time_without_its_zone_is_not_believed(quarters: int, lead_s: int) -> None:
    at = datetime.fromtimestamp(NOW_S + lead_s, timezone(timedelta(minutes=15 * quarters)))
    assert read_notice("aws", aws(at.isoformat()), NOW_S).deadline_s == NOW_S + lead_s
    bare = read_notice("aws", aws(at.replace(tzinfo=None).isoformat()), NOW_S)
    assert bare.deadline_s == NOW_S + (lead_s if quarters == 0 else 120)


def test_a_recommendation_has_its_time() -> None:
    assert read_rebalance('{"noticeTime": "2026-03-01T12:00:00Z"}') == NOW_S
    for text in ("", "{}", '{"noticeTime": 5}', '"x"'):
        with pytest.raises(MetadataError):
            read_rebalance(text)


def test_polls_are_five_seconds_apart_unless_the_service_was_waited_for() -> None:
    assert next_poll_s(0.01, pending=False) == pytest.approx(4.99)
    assert next_poll_s(20.0, pending=False) == 0.0
    assert next_poll_s(20.0, pending=True) == 1.0
