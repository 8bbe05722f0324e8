"""The router as a supervised process: it listens itself, comes back, and leaves no clean ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest

from ebbtide.platform.account import account
from ebbtide.platform.config import parse
from ebbtide.platform.errors import ServeError
from ebbtide.platform.ledger import read_ledger
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.ports import free_run
from ebbtide.serve import cluster as serving_cluster
from ebbtide.serve import job
from ebbtide.serve.config import RoleConfig, ServeConfig
from ebbtide.serve.fleet import Beat
from ebbtide.serve.routers import Routers
from tests.serve.small_endpoint import read
from tests.serve.stand_in import TOKEN, StandIn, says

pytestmark = pytest.mark.ray


def config(text: str = "") -> ServeConfig:
    port = free_run(1)
    return parse(f"{{name: m, model: {{uri: nowhere}}, http: {{port: {port}{text}}}}}", ServeConfig)


@pytest.fixture
def connected(cluster: LocalCluster) -> Iterator[None]:
    with serving_cluster.connected(cluster.address, ours=True):
        yield


@contextlib.contextmanager
def routed(config: ServeConfig) -> Iterator[list[Any]]:
    """The router and its spare, as a job starts them."""
    with contextlib.ExitStack() as resources:
        yield job._start_routers(config, [], TOKEN, resources)


def routers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::RouterProcess" in " ".join(process.cmdline()):
                found.append(process)
    return found


def who_listens(port: int) -> psutil.Process:
    (found,) = (
        process
        for process in routers()
        if any(
            each.status == psutil.CONN_LISTEN and each.laddr.port == port
            for each in process.net_connections("inet")
        )
    )
    return found


async def _until_answered(session: aiohttp.ClientSession, url: str) -> float:
    began_s = time.monotonic()
    while True:
        assert time.monotonic() - began_s < 60
        with contextlib.suppress(aiohttp.ClientError):
            answer = await read(session, url, prompt="go>", max_tokens=9)
            if answer.status == 200:
                assert answer.body["choices"][0]["text"] == says(9)
                return time.monotonic() - began_s
        await asyncio.sleep(0.05)


def test_a_killed_router_is_followed_and_cuts_no_stream_short_cleanly(
    connected: None, tmp_path: Path
) -> None:
    own = RoleConfig(usd_per_hour=Decimal(36))
    it = config().model_copy(update={"ledger": str(tmp_path), "decode": own})

    async def kill_under_a_stream(session: aiohttp.ClientSession) -> None:
        body = {"model": "m", "prompt": "go>", "max_tokens": 4000, "stream": True}
        async with session.post(f"{it.endpoint}/completions", json=body) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            who_listens(it.http.port).send_signal(signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):  # a broken connection
                await response.read()
        back_s = await _until_answered(session, it.endpoint.removesuffix("/v1"))
        print(f"requests are answered again {back_s:.2f} s after a router was killed")

    async def main(actors: list[Any]) -> None:
        worker = await StandIn(gap_s=0.02).start()
        stop = threading.Event()

        def beats() -> None:
            while not stop.wait(0.1):
                for actor in actors:
                    actor.beat.remote(Beat("w", "decode", worker.url, 4096, generation=2))

        beating = threading.Thread(target=beats)
        beating.start()
        began_s = time.time()
        try:
            async with aiohttp.ClientSession() as session:
                both = Routers(it, actors)
                await asyncio.to_thread(both.lead, [2], time.sleep)  # as after an update
                await _until_answered(session, it.endpoint.removesuffix("/v1"))
                for _ in range(2):  # the spare, and the first one that Ray has started again
                    before = {process.pid for process in routers()}
                    assert len(before) == 2
                    await kill_under_a_stream(session)
                    while len(routers()) < 2 or {each.pid for each in routers()} == before:
                        await asyncio.sleep(0.05)
                while worker.num_open:  # what it had begun has ended
                    await asyncio.sleep(0.01)
                while await asyncio.to_thread(both.num_at_work, 2):
                    await asyncio.sleep(0.05)
        finally:
            stop.set()
            beating.join()
            await worker.stop()
        for actor in actors:
            job._close_books(actor)
        whole = account(read_ledger(str(tmp_path)).records, time.time())
        # the two that were killed take the tokens with them that they had not written
        assert whole.served["anyone"].tokens >= len("go>") + 9
        assert 0 < time.time() - began_s - whole.total.seconds < 3, "not one node all the time"
        assert whole.total.spent.usd == Decimal(whole.total.time_us) / 10**8

    with routed(it) as actors:
        asyncio.run(asyncio.wait_for(main(actors), 240))
    deadline_s = time.monotonic() + 60
    while routers():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_router_that_cannot_listen_says_why(connected: None, tmp_path: Path) -> None:
    it = config(f", tls_certificate: {tmp_path}/no.pem, tls_key: {tmp_path}/no.key")
    with pytest.raises(ServeError, match="No such file"), routed(it):
        pass


def test_tls(connected: None, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"]
    subprocess.run(
        [*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True
    )
    it = config(f", tls_certificate: {certificate}, tls_key: {key}")
    assert it.endpoint.startswith("https://")

    async def main() -> None:
        import ssl

        trusting = ssl.create_default_context(cafile=str(certificate))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{it.endpoint}/models", ssl=trusting) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"{it.endpoint}/models")
            with pytest.raises(aiohttp.ClientError):
                await session.get(it.endpoint.replace("https", "http") + "/models")

    with routed(it):
        asyncio.run(main())
