"""Ports are checked before anything is started on them."""

from __future__ import annotations

import socket

import pytest

from ebbtide.platform.errors import ServeError
from ebbtide.serve.ports import free_run, require_free


def test_a_port_in_use_is_said_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"http\.port {port}.*in use.*http\.port=PORT"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_an_address_that_is_not_this_machines() -> None:
    with pytest.raises(ServeError, match=r"http\.host 192\.0\.2\.77"):
        require_free("192.0.2.77", 8000)


def test_a_run_of_free_ports() -> None:
    first = free_run(4)
    with socket.create_server(("", first + 2)):
        assert 20_000 <= first < 30_000
        for _ in range(20):
            found = free_run(4)
            assert first + 2 not in range(found, found + 4)
