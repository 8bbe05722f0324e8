"""Free ports are free, different, and where they were asked for."""

from __future__ import annotations

import socket

import pytest

from ebbtide.platform.ports import free_ports, free_run, try_to_listen


@pytest.mark.parametrize("also_above", [0, 10_000])
def test_free_ports_are_different_and_can_be_listened_on(also_above: int) -> None:
    ports = free_ports(5, also_above=also_above)
    assert len(set(ports)) == 5
    for port in ports:
        try_to_listen("127.0.0.1", port)
        try_to_listen("127.0.0.1", port + also_above)


def test_a_taken_port_cannot_be_listened_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        try_to_listen("127.0.0.1", taken.getsockname()[1])


def test_a_run_of_free_ports_leaves_out_a_taken_one() -> None:
    first = free_run(4)
    with socket.create_server(("", first + 2)):
        assert 20_000 <= first < 30_000
        for _ in range(20):
            found = free_run(4)
            assert first + 2 not in range(found, found + 4)
