"""Signals raise where they may, at the next check elsewhere, and are never lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ebbtide.platform import signals
from ebbtide.serve.interrupts import Interrupts, blocked


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_is_kept_for_the_next_check() -> None:
    with Interrupts() as interrupts:
        interrupts.check()
        send(signal.SIGTERM)
        send(signal.SIGINT)
        with pytest.raises(SystemExit) as raised:
            interrupts.check()
        assert raised.value.code == 143
        with pytest.raises(SystemExit), interrupts.raising():
            pytest.fail("what may be cut short is not begun")


def test_a_signal_raises_at_once_where_it_may() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(signals.Interrupted), interrupts.raising():
            send(signal.SIGINT)
            pytest.fail("the signal did not raise")
        assert not interrupts.may_raise


def test_only_the_first_raises_by_itself_and_one_that_was_swallowed_comes_back() -> None:
    reached = False
    with Interrupts() as interrupts:
        with interrupts.raising():
            try:
                send(signal.SIGINT)
            except KeyboardInterrupt:  # as Ray does
                send(signal.SIGINT)
                reached = True
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert reached


def test_the_handlers_of_before_come_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with Interrupts():
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


def test_outside_of_the_main_thread_nothing_is_done() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with Interrupts() as interrupts, interrupts.raising():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [before]


def test_signals_wait_for_the_end_of_a_block() -> None:
    with Interrupts() as interrupts:
        handler = signal.getsignal(signal.SIGTERM)
        with blocked():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray does
            signal.signal(signal.SIGTERM, handler)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # not to any other thread
            interrupts.check()
        with pytest.raises(SystemExit):
            interrupts.check()


def test_after_the_context_a_second_one_changes_nothing_while_the_first_unwinds() -> None:
    with signals.kept():
        with pytest.raises(SystemExit) as raised, signals.unwinding():
            try:
                with Interrupts() as interrupts:
                    send(signal.SIGTERM)
                    interrupts.check()
            finally:
                send(signal.SIGINT)
                send(signal.SIGTERM)
        assert raised.value.code == 143
