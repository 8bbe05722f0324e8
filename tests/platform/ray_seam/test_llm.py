"""Ray Serve LLM has what is used of it: in ``platform/ray_seam/llm.py`` and, where named, in serve.

Read from the installed sources, since importing them takes vLLM a quarter of a minute.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from ebbtide.platform import ray_seam
from tests.installed_sources import definitions, source
from tests.platform.ray_seam.pins import Pins

PINS = Pins("llm")
CORE = "llm/_internal/serve/core"
ENGINE = "llm/_internal/serve/engines/vllm"
CALLBACKS = "llm/_internal/common/callbacks/base.py"


def test_every_name_that_is_imported_exists() -> None:
    tree = ast.parse((Path(ray_seam.__path__[0]) / "llm.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if (node.module or "").startswith("ray."):
            path = f"{str(node.module).removeprefix('ray.').replace('.', '/')}.py"
            values = [each for each in source("ray", path).body if isinstance(each, ast.Assign)]
            named = {
                target.id for v in values for target in v.targets if isinstance(target, ast.Name)
            }
            known = {*definitions("ray", path), *named}
            PINS.knows(known, [each.name for each in node.names], path)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (CALLBACKS, ["CallbackBase.on_before_node_init"]),  # serve/replica.py LocalModel
        (
            f"{CORE}/server/llm_server.py",  # serve/replica.py
            ["LLMServer.start", "LLMServer.check_health", "LLMServer.__del__"],
        ),
        (
            f"{ENGINE}/vllm_engine.py",
            ["VLLMEngine.build_asgi_app", "VLLMEngine._start_async_llm_engine"],
        ),
    ],
)
def test_ray_serve_llm_has(path: str, names: list[str]) -> None:
    PINS.knows(definitions("ray", path), names, path)


def test_the_callback_can_take_the_download_over() -> None:  # serve/replica.py LocalModel
    callbacks = ast.unparse(source("ray", CALLBACKS))
    for text in ("run_init_node: bool = True", "self.kwargs =", "self.llm_config =", "self.ctx ="):
        assert text in callbacks, text
    engine = ast.unparse(source("ray", f"{ENGINE}/vllm_engine.py"))
    assert "if callback.ctx.run_init_node:" in engine
    models = ast.unparse(source("ray", f"{ENGINE}/vllm_models.py"))
    assert "hf_model_id: Optional[str]" in models
    PINS.knows(
        definitions("ray", f"{CORE}/configs/llm_config.py"),
        ["LLMConfig.get_engine_config"],
        "LLMConfig",
    )


def test_an_engine_can_have_another_executor_than_rays() -> None:
    models = ast.unparse(source("ray", f"{ENGINE}/vllm_models.py"))
    assert "engine_kwargs['distributed_executor_backend'] = executor_backend" in models
    engine = definitions("ray", f"{ENGINE}/vllm_engine.py")
    started = engine["VLLMEngine._start_async_llm_engine"]
    assert isinstance(started, ast.FunctionDef)
    taken = [each.arg for each in started.args.args]
    assert taken == ["self", "vllm_engine_args", "vllm_engine_config", "placement_group"]
    assert "Executor.get_class(vllm_engine_config)" in ast.unparse(started)
    server = ast.unparse(source("ray", f"{CORE}/server/llm_server.py"))
    assert "return self._default_engine_cls" in server  # serve/replica.py EngineServer


def test_a_connector_that_is_registered_twice_is_refused() -> None:  # register_connectors
    factory = f"{ENGINE}/kv_transfer/factory.py"
    names = ["register_backend", "unregister_backend"]
    PINS.knows(
        definitions("ray", factory),
        [f"KVConnectorBackendFactory.{each}" for each in names],
        factory,
    )
    text = ast.unparse(source("ray", factory))
    assert "for name, backend_path in BUILTIN_BACKENDS.items():" in text
    assert text.endswith("_initialize_registry()")
    registry = ast.unparse(source("ray", "llm/_internal/serve/utils/registry.py"))
    assert "if self.contains(name):" in registry and "is already registered." in registry


def test_the_engines_client_is_where_it_is_looked_for() -> None:
    engine = ast.unparse(source("ray", f"{ENGINE}/vllm_engine.py"))
    assert "self._engine_client = self._start_async_llm_engine(" in engine
    assert "self.engine =" in ast.unparse(source("ray", f"{CORE}/server/llm_server.py"))


def test_the_server_starts_its_engine_where_the_report_of_usage_can_be_left_out() -> None:
    server = definitions("ray", f"{CORE}/server/llm_server.py")
    starting = ast.unparse(server["LLMServer._start_engine"])
    assert "await self.engine.start()" in starting
    assert "push_telemetry_report_for_all_models(" in starting
