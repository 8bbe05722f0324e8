"""The endpoint's port, looked at before anything is started."""

from __future__ import annotations

from ebbtide.platform import ports
from ebbtide.platform.errors import ServeError


def require_free(host: str, port: int) -> None:
    """Raise ServeError if nothing can listen on the port, saying why."""
    try:
        ports.try_to_listen(host, port)
    except OSError as error:
        raise ServeError(
            f"http.host {host}, http.port {port}: cannot listen there: {error.strerror or error}; "
            "stop what uses the port, or choose another with --set http.port=PORT"
        ) from error
