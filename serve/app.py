"""The Ray Serve applications: the workers of each role, which the router finds by what they say.

One application a role, so that each can be started, scaled and ended by itself. Imports vLLM.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from ray.serve.llm import LLMConfig, build_llm_deployment
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from ebbtide.platform.errors import ConfigError
from ebbtide.platform.ray_seam.llm import register_connectors
from ebbtide.serve.config import Role, ServeConfig
from ebbtide.serve.engine import Site, application_names, llm_config
from ebbtide.serve.replica import EngineServer

__all__ = ["build", "check_options", "register_connectors"]


def check_options(options: Iterable[str]) -> None:
    """Raise ConfigError for an option that vLLM does not have, with the nearest that it has."""
    known = {field.name for kind in (AsyncEngineArgs, FrontendArgs) for field in fields(kind)}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "see vLLM's engine arguments"
            raise ConfigError(f"engine.{name} is not an option of vLLM; {hint}")


def build(
    config: ServeConfig,
    site: Site,
    counts: Mapping[Role, int],
    environments: Mapping[Role, dict[str, Any]],
) -> dict[str, Any]:
    """The applications of the roles in ``counts`` by name, not yet running, with so many replicas.

    ``environments`` are the runtime environments of each role's replicas. Raises ConfigError for
    what vLLM refuses.
    """
    try:
        configs = {
            role: LLMConfig(
                **llm_config(config, role, site, number), runtime_env=environments[role]
            )
            for role, number in counts.items()
        }
    except ValueError as error:
        raise ConfigError(f"{config.name}: Ray Serve LLM refuses the engines: {error}") from error
    names = application_names(config, site.generation)
    host = "127.0.0.1" if site.is_loopback else None
    return {
        names[role]: build_llm_deployment(
            own,
            name_prefix=f"{role}:",
            bind_kwargs={
                "role": role,
                "routers": site.routers,
                "token": site.token,
                "host": host,
                "generation": site.generation,
            },
            deployment_cls=EngineServer,
        )
        for role, own in configs.items()
    }
