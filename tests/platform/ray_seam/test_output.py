"""Workers' lines reach a person as they were written, through Ray's own printer where it is."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ebbtide.platform import log
from tests.platform.ray_seam.pins import Pins

PINS = Pins("output")
TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no"]


@pytest.fixture
def dispatcher() -> Any:
    return PINS.own("dispatcher")


@pytest.fixture
def others(dispatcher: Any) -> Any:
    """What goes Ray's way."""
    batches: list[Any] = []
    dispatcher.add_handler("ray_print_logs", batches.append)
    yield batches
    dispatcher.remove_handler("ray_print_logs")


def test_lines_of_our_log_are_shown_plain_and_the_others_by_ray(
    dispatcher: Any, others: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    formatter = log._Human()
    ours = [
        formatter.format(logging.LogRecord("x", level, "", 0, f"{level}", None, None))
        for level in (logging.INFO, logging.WARNING, logging.ERROR)
    ]
    batch = {"pid": 7, "is_err": True}
    with PINS.own("plain")():
        dispatcher.emit({**batch, "lines": [*ours, "", *TRACEBACK]})
        dispatcher.emit({**batch, "lines": ours})
        dispatcher.emit({**batch, "lines": [" "]})
    assert capsys.readouterr().err.splitlines() == ours * 2
    assert others == [{**batch, "lines": TRACEBACK}]
    dispatcher.emit({**batch, "lines": ours})
    assert others[1:] == [{**batch, "lines": ours}]


def test_a_node_that_died_is_told_without_the_end_of_its_log(
    dispatcher: Any, others: list[Any]
) -> None:
    died = "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL."
    log_of_it = " Last 20 lines of the Raylet logs:\n    [state-dump] 1\n    [state-dump] 2"
    with PINS.own("plain")():
        dispatcher.emit({"pid": "raylet", "lines": [died + log_of_it]})
        dispatcher.emit({"pid": "raylet", "lines": ["What is not that. Last\nof all"]})
    assert [each["lines"] for each in others] == [[died], ["What is not that. Last\nof all"]]
    PINS.says("ray._private.process_watcher", '"Raylet is terminated. "', 'f"Last {')


def test_workers_that_are_not_to_be_heard_are_not(dispatcher: Any) -> None:
    before = list(dispatcher.handlers)
    with PINS.own("plain")():
        assert dispatcher.handlers == before
    assert dispatcher.handlers == before


def test_ray_prints_through_the_handler_and_logs_through_the_logger_that_are_replaced() -> None:
    PINS.says(
        "ray._private.worker",
        'add_handler(\n                "ray_print_logs"',
        "global_worker_stdstream_dispatcher.emit(data)",
    )
    PINS.takes("ray._private.worker:print_to_stdstream", "data")
    PINS.says(
        "ray.train.v2._internal.util:construct_user_exception_with_traceback", "logger.error("
    )


def test_an_error_that_was_judged_is_not_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    util = PINS.find("ray.train.v2._internal.util")
    before = util.logger.level
    try:
        PINS.own("mute_training_errors")()
        util.construct_user_exception_with_traceback(ValueError("judged"))
    finally:
        util.logger.setLevel(before)
    assert caplog.records == []
