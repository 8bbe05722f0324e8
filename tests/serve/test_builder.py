"""What starts workers runs in the cluster: what is wrong there is told here as it was raised."""

from __future__ import annotations

import contextlib
import sys
import time

import pytest
import ray

from ebbtide.platform.config import parse
from ebbtide.platform.errors import ConfigError, ServeError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.serve import builder
from ebbtide.serve import cluster as serving_cluster
from ebbtide.serve.builder import Builder
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import Site
from tests.serve import light_workers

_SITE = Site({"prefill": 21000, "decode": 21002}, True, ("a", "b"), "t")


def _interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.ray
def test_errors_come_back(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{{name: m, model: {{uri: x}}, engine: {{{light_workers.UNKNOWN}: 1}}}}"
    config = parse(text, ServeConfig)
    monkeypatch.setattr(builder, "FORK_MODULES", ())
    with serving_cluster.connected(cluster.address, ours=True):
        monkeypatch.setattr(builder, "MODULE", light_workers.__name__)
        unknown = f"engine.{light_workers.UNKNOWN}"
        with Builder(config, _SITE) as found, pytest.raises(ConfigError, match=unknown):
            found.prepare()
        with pytest.raises(ServeError, match="m: its workers cannot be started"):
            while True:  # until it has ended, for which nobody waits
                with contextlib.suppress(ConfigError):
                    found.prepare()
        monkeypatch.setattr(builder, "MODULE", "tests.serve.nowhere")
        with Builder(config, _SITE) as found, pytest.raises(ServeError, match="No module named"):
            found.prepare()
        never = ray.remote(lambda: time.sleep(600)).options(num_cpus=0).remote()
        with Builder(config, _SITE, _interrupted) as found, pytest.raises(KeyboardInterrupt):
            found._answer(never)
        ray.cancel(never, force=True)
    assert "vllm" not in sys.modules
