"""What serving knows of vLLM's inner ways is still so; read from its installed sources."""

from __future__ import annotations

import ast

from ebbtide.serve.beats import _COUNTS
from ebbtide.serve.engine import IN_ENGINE
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


def test_a_model_can_be_computed_in_the_engines_process() -> None:  # serve/engine.py IN_ENGINE
    module, _, name = IN_ENGINE.removeprefix("vllm.").rpartition(".")
    executor = definitions("vllm", f"{module.replace('.', '/')}.py")[name]
    assert "self.driver_worker" in ast.unparse(executor)
    chosen = ast.unparse(definitions("vllm", "v1/executor/abstract.py")["Executor.get_class"])
    assert "resolve_obj_by_qualname(distributed_executor_backend)" in chosen
    platform = ast.unparse(source("vllm", "platforms/cpu.py"))
    assert "parallel_config.distributed_executor_backend == 'uni'" in platform  # by this name only


def test_an_engine_says_whether_it_sleeps_without_its_workers() -> None:  # serve/beats.py
    core = ast.unparse(definitions("vllm", "v1/engine/core.py")["EngineCore.is_sleeping"])
    assert "collective_rpc" not in core and "self.model_executor.is_sleeping" in core


def test_keys_that_nobody_will_fetch_can_be_given_up() -> None:  # serve/replica.py
    client = definitions("vllm", "v1/engine/async_llm.py")["AsyncLLM"]
    scheduler = definitions(
        "vllm", "distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py"
    )["NixlPullConnectorScheduler.request_finished"]
    assert "async def notify_kv_transfer_request_rejected(" in ast.unparse(client)
    assert "self._reqs_need_recv[request.request_id] = (request, [], ())" in ast.unparse(scheduler)


def test_the_counts_of_an_engine_have_these_names() -> None:  # serve/beats.py
    metrics = ast.unparse(source("vllm", "v1/metrics/loggers.py"))
    for name in _COUNTS:
        assert f"name='{name.removesuffix('_sum').removesuffix('_count')}'" in metrics
