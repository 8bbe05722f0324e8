"""A server of its own, and that its end is noticed without asking for it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

from ebbtide.platform.ports import free_run
from ebbtide.serve.http_server import HttpServer, until_it_ends

_LISTENS = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listens", flush=True)
connection, _ = listener.accept()
print("is watched", flush=True)
connection.recv(1)
"""


async def _nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nothing is asked")


def test_the_end_of_a_process_that_listens_is_noticed() -> None:
    port = free_run(1)
    command = [sys.executable, "-c", _LISTENS, str(port)]

    async def main(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        watching = asyncio.create_task(until_it_ends("0.0.0.0", port))
        assert await asyncio.to_thread(process.stdout.readline) == "is watched\n"
        assert not watching.done()
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.wait_for(watching, 60)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            asyncio.run(main(process))
        finally:
            process.kill()
    asyncio.run(asyncio.wait_for(until_it_ends("127.0.0.1", port), 60))  # nobody listens


def test_who_watches_a_server_is_no_request_of_it() -> None:
    async def main() -> None:
        server = HttpServer(_nothing, "127.0.0.1")
        await server.start()
        watching = asyncio.create_task(until_it_ends("127.0.0.1", server.port))
        probe = socket.create_connection(("127.0.0.1", server.port))  # comes after it
        probe.sendall(b"no HTTP\r\n\r\n")
        reader, writer = await asyncio.open_connection(sock=probe)
        assert b" 400 " in await reader.readline()
        writer.close()
        assert not watching.done()
        await server.stop()
        await asyncio.wait_for(watching, 60)

    asyncio.run(main())
