"""What serving knows of vLLM's inner ways is still so; read from its installed sources."""

from __future__ import annotations

import ast

from ebbtide.serve.model_files import CPU_HEAD_SIZES
from tests.installed_sources import definitions, source


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


def test_an_engine_says_whether_it_sleeps_without_its_workers() -> None:  # serve/beats.py
    core = ast.unparse(definitions("vllm", "v1/engine/core.py")["EngineCore.is_sleeping"])
    assert "collective_rpc" not in core and "self.model_executor.is_sleeping" in core
