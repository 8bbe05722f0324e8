"""The Ray Serve application: ingress -> decode workers -> prefill workers.

The graph is that of ``ray.serve.llm.build_pd_openai_app``, put together from the same public parts,
because that builder takes neither server classes nor an ASGI application of one's own. Imports
vLLM.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from ray import serve
from ray.serve.llm import LLMConfig, build_llm_deployment
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from ebbtide.platform.errors import ConfigError
from ebbtide.platform.ray_seam.llm import to_model_metadata
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import Site, llm_config
from ebbtide.serve.ingress import build_ingress
from ebbtide.serve.replica import DecodeServer, PrefillServer

_MAX_ONGOING_REQUESTS = 10_000


def check_options(options: Iterable[str]) -> None:
    """Raise ConfigError for an option that vLLM does not have, with the nearest that it has."""
    known = {field.name for kind in (AsyncEngineArgs, FrontendArgs) for field in fields(kind)}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "see vLLM's engine arguments"
            raise ConfigError(f"engine.{name} is not an option of vLLM; {hint}")


def build(config: ServeConfig, site: Site) -> Any:
    """The application, not yet running. Raises ConfigError for what vLLM does not accept."""
    try:
        configs = {
            role: LLMConfig(**llm_config(config, role, site)) for role in site.side_channel_ports
        }
    except ValueError as error:
        raise ConfigError(f"{config.name}: Ray Serve LLM refuses the engines: {error}") from error
    prefill = build_llm_deployment(
        configs["prefill"], name_prefix="prefill:", deployment_cls=PrefillServer
    )
    decode = build_llm_deployment(
        configs["decode"],
        name_prefix="decode:",
        bind_kwargs={"prefill_server": prefill},
        deployment_cls=DecodeServer,
    )
    ingress = serve.deployment(
        build_ingress(),
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )
    name = config.model_name
    return ingress.bind(
        llm_deployments={name: decode},
        model_cards={name: to_model_metadata(name, configs["decode"])},
    )
