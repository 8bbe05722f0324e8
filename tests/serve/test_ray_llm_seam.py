"""The interfaces of Ray and vLLM that are not public are as serving needs them.

Read from the installed sources, since importing them takes vLLM a quarter of a minute. A failure
here after an upgrade names what has changed; see the module that is named beside it.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from ebbtide.serve.model_files import CPU_HEAD_SIZES

_RAY_LLM = "llm/_internal"
_PD_SERVER = f"{_RAY_LLM}/serve/serving_patterns/prefill_decode/pd_server.py"


def source(package: str, path: str) -> ast.Module:
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None, f"{package} is not installed"
    return ast.parse((Path(found.origin).parent / path).read_text(encoding="utf-8"))


def definitions(package: str, path: str) -> dict[str, ast.AST]:
    """Classes, functions and methods (as ``Class.method``) of a module."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found: dict[str, ast.AST] = {}
    for node in source(package, path).body:
        if isinstance(node, kinds):
            found[node.name] = node
            for child in getattr(node, "body", []):
                if isinstance(child, kinds):
                    found[f"{node.name}.{child.name}"] = child
    return found


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            f"{_RAY_LLM}/serve/core/configs/openai_api_models.py",
            {"ChatCompletionRequest", "CompletionRequest", "OpenAIHTTPException"}
            | {"ErrorInfo", "ErrorResponse", "to_model_metadata"},
        ),
        (f"{_RAY_LLM}/common/callbacks/base.py", {"CallbackBase.on_before_node_init"}),
        (_PD_SERVER, {"PDDecodeServer.chat", "PDDecodeServer.completions", "PDPrefillServer"}),
        (
            f"{_RAY_LLM}/serve/core/server/llm_server.py",
            {"LLMServer.chat", "LLMServer.completions", "LLMServer.__del__"},
        ),
        (
            f"{_RAY_LLM}/serve/core/ingress/ingress.py",
            {"OpenAiIngress.chat", "OpenAiIngress.completions", "OpenAiIngress.models"}
            | {"OpenAiIngress.model_data", "make_fastapi_ingress"},
        ),
    ],
)
def test_ray_serve_llm_has(path: str, names: set[str]) -> None:
    assert names - set(definitions("ray", path)) == set()


def test_the_callback_can_take_the_download_over() -> None:  # serve/replica.py LocalModel
    callbacks = ast.unparse(source("ray", f"{_RAY_LLM}/common/callbacks/base.py"))
    assert "run_init_node: bool = True" in callbacks
    engine = ast.unparse(source("ray", f"{_RAY_LLM}/serve/engines/vllm/vllm_engine.py"))
    assert "if callback.ctx.run_init_node:" in engine
    assert "self._engine_client = self._start_async_llm_engine(" in engine  # engine_client


def test_one_prompts_keys_go_to_every_sequence() -> None:  # why serve/split.py is needed
    serving = ast.unparse(source("vllm", "entrypoints/openai/completion/serving.py"))
    assert "kv_transfer_params = final_res_batch[0].kv_transfer_params" in serving


def test_the_head_sizes_of_cpu_attention() -> None:  # serve/model_files.py
    method = definitions("vllm", "v1/attention/backends/cpu_attn.py")[
        "CPUAttentionBackend.get_supported_head_sizes"
    ]
    returned = next(node for node in ast.walk(method) if isinstance(node, ast.Return))
    assert returned.value is not None
    assert tuple(ast.literal_eval(returned.value)) == CPU_HEAD_SIZES
