"""An endpoint whose workers come and go, in Ray Serve on real nodes, with stand-ins for engines."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve

from ebbtide.platform.config import parse
from ebbtide.platform.local_cluster import LocalCluster, NodeHandle
from ebbtide.platform.ports import free_run
from ebbtide.serve import builder, job
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.serving import Serving
from tests.serve import light_workers
from tests.serve.light_workers import DRAIN_S
from tests.serve.served import family
from tests.serve.stand_in import says

pytestmark = pytest.mark.ray

_LIMIT_S = 120.0
_LONG = 4000
"""Tokens of a stream that outlives the test."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


class Follower:
    """A client that reads a stream, to its end or until it leaves; ``text`` so far."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self.text, self.is_done, self.error = "", False, None
        body = {"model": "tide", "prompt": "go>", "temperature": 0, "max_tokens": num_tokens}
        self._asked = urllib.request.Request(
            f"{url}/v1/completions",
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        self._has_left = False
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def leave(self) -> None:
        """Read no more."""
        self._has_left = True
        self._thread.join()

    def _follow(self) -> None:
        with urllib.request.urlopen(self._asked, timeout=_LIMIT_S) as response:
            for line in response:
                if self._has_left:
                    return
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.error = event.get("error")
                    self.text += "".join(each["text"] for each in event.get("choices", []))
                self.is_done = self.is_done or line == b"data: [DONE]\n"


class Endpoint:
    """A started endpoint, tended while a test waits."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._url = serving.endpoint.removesuffix("/v1")

    def until(self, condition: Callable[[], object]) -> float:
        """Tend it until something is so; the seconds that took."""
        began_s = time.monotonic()
        while not condition():
            assert time.monotonic() - began_s < _LIMIT_S, self.states()
            self._serving.tend()
            time.sleep(0.02)
        return time.monotonic() - began_s

    def ask(self, num_tokens: int) -> Follower:
        """A stream of so many tokens, of 20 ms each."""
        return Follower(self._url, num_tokens)

    @property
    def num_moved(self) -> float:
        """Streams that went on elsewhere."""
        text = urllib.request.urlopen(f"{self._url}/metrics").read().decode()
        return float(text.split("\nebbtide_moved_streams_total ")[1].split()[0])

    def states(self) -> dict[str, dict[str, int]]:
        """The replicas of each role, by state."""
        found = {}
        for name, application in serve.status().applications.items():
            (deployment,) = application.deployments.values()
            states: Any = deployment.replica_states
            found[name] = {str(getattr(k, "value", k)): n for k, n in states.items()}
        return found

    def are(self, prefill: int, decode: int) -> bool:
        """Whether there are so many replicas and no other, and the routers know it."""
        wanted = {"tide.prefill": prefill, "tide.decode": decode}
        ready = self._serving._routers.ready(1)
        return self.states() == {k: {"RUNNING": n} if n else {} for k, n in wanted.items()} and (
            ready == {"prefill": prefill, "decode": decode}
        )


@contextlib.contextmanager
def started(model: Path, cluster: LocalCluster, text: str) -> Iterator[Endpoint]:
    job_file = f"name: tide\nmodel: {{uri: {model}}}\nhttp: {{port: {free_run(1)}}}\n{text}"
    with job.start(parse(job_file, ServeConfig), cluster.address) as serving:
        yield Endpoint(serving)


_SCALING = """
prefill: {replicas: {min: 0, max: 2}}
decode: {replicas: {min: 0, max: 2}}
scaling: {idle_s: 2, down_after_s: 3, gap_s: 100}
"""


def test_workers_come_and_go_with_requests_and_with_nodes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "MODULE", light_workers.__name__)
    monkeypatch.setattr(builder, "FORK_MODULES", ())
    with (
        LocalCluster(nodes=2, cpus_per_node=4) as cluster,
        started(model, cluster, _SCALING) as endpoint,
    ):
        took_s = endpoint.until(lambda: endpoint.are(0, 0))
        print(f"none {took_s:.1f} s after the start, of which 2 s idle")

        kept = endpoint.ask(_LONG)  # so that they do not go again
        waiting = [endpoint.ask(30) for _ in range(3)]
        took_s = endpoint.until(lambda: all(each.is_done for each in waiting))
        print(f"from none: answered after {took_s:.1f} s")
        assert all(each.text == says(30) for each in waiting)

        endpoint.until(lambda: endpoint.are(1, 1))  # the first may have been a prefill worker
        many = [kept, *(endpoint.ask(_LONG) for _ in range(6))]  # fill a decode worker's blocks
        took_s = endpoint.until(lambda: endpoint.are(1, 2))
        print(f"one more {took_s:.1f} s after the load")
        long = [endpoint.ask(_LONG) for _ in range(2)]
        endpoint.until(lambda: all(each.text for each in long))
        for each in many:
            each.leave()
        took_s = endpoint.until(lambda: endpoint.are(1, 1))
        print(f"one less {took_s:.1f} s after the load, of which 3 s patience, {DRAIN_S} s drain")

        node, before = node_of("decode", cluster), endpoint.num_moved
        cluster.drain(node, time.time() + 60)
        took_s = endpoint.until(lambda: not cluster.is_alive(node) and endpoint.are(1, 1))
        print(f"the node was left {took_s:.1f} s after a notice of 60 s")
        assert endpoint.num_moved >= before + len(long)
        lengths = [len(each.text) for each in long]
        endpoint.until(lambda: all(len(e.text) > n for e, n in zip(long, lengths, strict=True)))
        for each in (*many, *long):
            each.leave()
            assert each.error is None and says(_LONG).startswith(each.text)


def node_of(role: str, cluster: LocalCluster) -> NodeHandle:
    """Where the only worker of a role is."""
    (found,) = (
        node
        for node in cluster.nodes
        for process in family(node.process.pid)
        if f"tide.{role}" in " ".join(process.cmdline())
    )
    return found
