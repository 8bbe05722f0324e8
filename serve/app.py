"""The Ray Serve application: ingress -> decode workers -> prefill workers.

The graph is that of ``ray.serve.llm.build_pd_openai_app``, put together from the same public parts,
because that builder takes neither server classes nor an ASGI application of one's own. Imports
vLLM.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.llm import LLMConfig, build_llm_deployment

from ebbtide.platform.errors import ConfigError
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import Site, llm_config
from ebbtide.serve.ingress import build_ingress
from ebbtide.serve.ray_llm_seam import to_model_metadata
from ebbtide.serve.replica import DecodeServer, PrefillServer

_MAX_ONGOING_REQUESTS = 10_000


def build(config: ServeConfig, site: Site) -> Any:
    """The application, not yet running. Raises ConfigError for engine options that vLLM lacks."""
    configs = {
        role: _llm_config(llm_config(config, role, site)) for role in site.side_channel_ports
    }
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


def _llm_config(fields: dict[str, Any]) -> LLMConfig:
    try:
        config = LLMConfig(**fields)
        config.get_engine_config()
    except ValueError as error:
        raise ConfigError(f"engine: {error}; see vLLM's engine arguments") from error
    return config
