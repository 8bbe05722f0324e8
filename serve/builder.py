"""What needs vLLM to start workers is done in a process of the cluster, which imports it.

The command does not: it would take it many seconds and a gigabyte, and the node of the engines has
to import the same once more. Promises: the process is forked from where that node's engines are
forked from, so that the node imports vLLM once for all of them, beginning with the first
:class:`Builder`; and it ends with the context.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from ebbtide.platform.errors import ServeError
from ebbtide.serve import cluster
from ebbtide.serve.config import Role, ServeConfig
from ebbtide.serve.engine import FORK_MODULES, Site, demand, environment

MODULE = "ebbtide.serve.app"
"""The module that builds the applications, and imports vLLM."""

_LOOK_S = 1.0


class BuilderProcess:
    """What the actor is."""

    def __init__(self, module: str) -> None:
        self._module = module

    def prepare(self, options: Iterable[str]) -> None:
        """Check options of vLLM, and have the cluster ready for workers. Raises ConfigError."""
        app = importlib.import_module(self._module)
        app.check_options(options)
        app.register_connectors()

    def run(
        self,
        config: ServeConfig,
        site: Site,
        counts: Mapping[Role, int],
        environments: Mapping[Role, dict[str, Any]],
    ) -> None:
        """Have Ray Serve run the applications of the roles in ``counts`` with so many replicas."""
        from ray import serve

        built = importlib.import_module(self._module).build(config, site, counts, environments)
        serve.run_many(
            [
                serve.RunTarget(app, name=name, route_prefix=None, external_scaler_enabled=True)
                for name, app in built.items()
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )


class Builder:
    """Such a process for the workers at ``site``, which begins to import; a context that ends it.

    Every method raises ServeError when the process does not answer. ``look`` is called every second
    of waiting, and may raise what ends it.
    """

    def __init__(
        self, config: ServeConfig, site: Site, look: Callable[[], None] = lambda: None
    ) -> None:
        from ebbtide.platform.ray_seam.workers import forked_environment

        self._config, self._site, self._look = config, site, look
        self._environments = {
            role: forked_environment(environment(config, role, site), FORK_MODULES)
            for role in config.roles
        }
        self._actor, self._node = cluster.where_room_is(
            demand(config, {"decode": 1})[0],
            BuilderProcess,
            self._environments["decode"],
            MODULE,
        )

    def __enter__(self) -> Builder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cluster.end(self._actor)

    def prepare(self) -> None:
        """Check what only vLLM can, and have the cluster ready for workers, once before the first
        are started. Raises ConfigError."""
        self._answer(self._actor.prepare.remote(list(self._config.engine)))

    def run(self, counts: Mapping[Role, int]) -> None:
        """Have applications with so many workers of the roles in ``counts``, of which there are
        none yet; does not wait for them. Raises ConfigError for what vLLM refuses."""
        self._answer(self._actor.run.remote(self._config, self._site, counts, self._environments))

    def _answer(self, reference: Any) -> None:
        import ray

        what = f"{self._config.name}: its workers cannot be started"
        deadline_s = time.monotonic() + self._config.start_timeout_s
        while not ray.wait([reference], timeout=_LOOK_S)[0] and time.monotonic() < deadline_s:
            self._look()
            if not cluster.is_alive(self._node):  # Ray would wait for it
                raise ServeError(f"{what}: the node where vLLM is imported for it has gone")
        cluster.answer_of(reference, what, _LOOK_S)
