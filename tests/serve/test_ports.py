"""The endpoint's port is looked at before anything is started."""

from __future__ import annotations

import socket

import pytest

from ebbtide.platform.errors import ServeError
from ebbtide.serve.ports import require_free


def test_a_port_in_use_is_said_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"http\.port {port}.*in use.*http\.port=PORT"):
            require_free("127.0.0.1", port)
    require_free("127.0.0.1", port)


def test_an_address_that_is_not_this_machines() -> None:
    with pytest.raises(ServeError, match=r"http\.host 192\.0\.2\.77"):
        require_free("192.0.2.77", 8000)
