"""What the engines of each role are started with."""

from __future__ import annotations

import importlib

from ebbtide.platform.config import parse
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import (
    IN_ENGINE,
    MODEL_CALLBACK,
    WORKER_EXTENSION,
    Site,
    demand,
    engine_options,
    environment,
    llm_config,
    num_ports,
    side_channel_ports,
)

_SITE = Site({"prefill": 20_100, "decode": 20_102}, True, ("router",), "token")


def config(text: str = "") -> ServeConfig:
    return parse(f"name: tide\nmodel: {{uri: out}}\n{text}", ServeConfig)


def test_any_worker_can_do_all_of_a_request_and_the_roles_differ_in_ports() -> None:
    for role, port in _SITE.side_channel_ports.items():
        fields = llm_config(config(), role, _SITE)
        transfer = fields["engine_kwargs"]["kv_transfer_config"]
        assert transfer["kv_connector"] == "NixlConnector"
        assert transfer["kv_role"] == "kv_both"
        assert transfer["kv_load_failure_policy"] == "recompute"
        assert fields["experimental_configs"]["NIXL_SIDE_CHANNEL_PORT_BASE"] == port
        assert fields["callback_config"]["callback_kwargs"]["uri"] == "out"


def test_a_colocated_endpoint_has_decode_workers_only() -> None:
    colocated = config("mode: colocated\ndecode: {replicas: 2}")
    assert list(colocated.roles) == ["decode"]
    assert "kv_transfer_config" not in engine_options(colocated, "decode")
    assert demand(colocated, colocated.counts) == [{"CPU": 1}] * 2
    assert num_ports(colocated) == 4
    assert side_channel_ports(colocated, 100) == {"decode": 100}


def test_every_replicas_gpu_has_a_side_channel_of_its_own() -> None:
    text = "accelerator: gpu\nprefill: {gpus: 2, replicas: 3}\ndecode: {gpus: 1, replicas: 2}"
    assert num_ports(config()) == 4  # replicas that end keep theirs while others take their place
    assert num_ports(config(text)) == 16
    assert side_channel_ports(config(text), 20_000) == {"prefill": 20_000, "decode": 20_012}


def test_options_of_cpu_engines() -> None:
    options = engine_options(config("dtype: fp32\nprefill: {kv_cache_gb: 0.5}"), "prefill")
    assert options["dtype"] == "float32"
    assert options["enforce_eager"] is True
    assert options["kv_cache_memory_bytes"] == 2**29
    assert options["distributed_executor_backend"] == IN_ENGINE
    assert options["kv_transfer_config"]["kv_buffer_device"] == "cpu"
    assert "max_model_len" not in options
    assert engine_options(config(), "decode")["dtype"] == "auto"


def test_options_of_gpu_engines() -> None:
    text = "accelerator: gpu\nprefill: {gpus: 1}\ndecode: {gpus: 4, replicas: 2, cpus: 3}"
    fields = llm_config(config(text), "decode", _SITE, 2)
    options = fields["engine_kwargs"]
    assert options["tensor_parallel_size"] == 4
    assert options["enforce_eager"] is False
    assert options["kv_transfer_config"]["kv_buffer_device"] == "cuda"
    assert not options.keys() & {"kv_cache_memory_bytes", "distributed_executor_backend"}
    assert fields["accelerator_config"] == {"kind": "gpu"}
    assert fields["deployment_config"]["num_replicas"] == 2
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(config(text), "decode", _SITE)
    assert demand(config(text), config(text).counts) == [
        {"CPU": 1.0, "GPU": 1.0},
        *[{"CPU": 3.0, "GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}] * 2,
    ]


def test_speculation_and_quantization_are_the_same_for_both_roles() -> None:
    text = "quantization: w4\nspeculation: {draft: s3://small, tokens: 3}"
    for role in ("prefill", "decode"):
        options = engine_options(config(text), role)  # keys and values of the draft move, too
        assert options["speculative_config"] == {
            "method": "draft_model",
            "model": "s3://small",
            "num_speculative_tokens": 3,
        }
        assert options["dtype"] == "bfloat16"
        kwargs = llm_config(config(text), role, _SITE)["callback_config"]["callback_kwargs"]
        assert kwargs == {"uri": "out", "quantization": "w4", "draft": "s3://small"}
    assert "speculative_config" not in engine_options(config(), "decode")


def test_further_engine_options_are_passed_on() -> None:
    options = engine_options(config("engine: {max_num_seqs: 4, enforce_eager: false}"), "decode")
    assert options["max_num_seqs"] == 4
    assert options["enforce_eager"] is False


def test_only_a_cluster_on_one_machine_is_kept_to_loopback() -> None:
    assert environment(config(), "prefill", _SITE)["UCX_NET_DEVICES"] == "lo"
    elsewhere = Site({"prefill": 1, "decode": 2}, False, ("router",), "token")
    assert "UCX_NET_DEVICES" not in environment(config(), "prefill", elsewhere)
    assert environment(config("prefill: {threads: 3}"), "prefill", _SITE)["OMP_NUM_THREADS"] == "3"


def test_a_replica_reserves_what_it_is_given_and_no_more() -> None:
    fields = llm_config(config("prefill: {cpus: 2, replicas: 2}"), "prefill", _SITE)
    assert fields["placement_group_config"] == {"bundles": [{"CPU": 2.0}]}
    assert fields["deployment_config"]["ray_actor_options"] == {"num_cpus": 0}
    both = config("prefill: {cpus: 2, replicas: 2}")
    assert demand(both, both.counts) == [{"CPU": 2}, {"CPU": 2}, {"CPU": 1}]


def test_classes_that_are_named_by_text_are_there() -> None:
    for name in (MODEL_CALLBACK, WORKER_EXTENSION):
        module, _, attribute = name.rpartition(".")
        path = importlib.util.find_spec(module)
        assert path is not None and path.origin is not None
        with open(path.origin, encoding="utf-8") as file:
            assert f"class {attribute}" in file.read()
