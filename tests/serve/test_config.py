"""A wrong serving job file is refused with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide.platform.config import load, parse
from ebbtide.platform.errors import ConfigError
from ebbtide.serve.config import ServeConfig

_MINIMAL = "name: tide\nmodel: {uri: out}\n"


def test_defaults_are_loopback_cpu_and_one_of_each_role() -> None:
    config = parse(_MINIMAL, ServeConfig)
    assert config.endpoint == "http://127.0.0.1:8000/v1"
    assert config.accelerator == "cpu"
    assert config.prefill.replicas == config.decode.replicas == 1
    assert config.model_name == "tide"
    assert parse("name: a\nmodel: {uri: out, name: b}\n", ServeConfig).model_name == "b"


def test_the_example_is_valid() -> None:
    example = Path(__file__).parents[2] / "examples" / "stdlib-lm" / "serve.yaml"
    assert load(example, ServeConfig).model_name == "stdlib-lm"


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000/v1"),
        ("::", "http://[::1]:8000/v1"),
        ("::1", "http://[::1]:8000/v1"),
        ("10.1.2.3", "http://10.1.2.3:8000/v1"),
    ],
)
def test_the_endpoint_is_one_that_a_client_here_can_use(host: str, endpoint: str) -> None:
    assert parse(f'{_MINIMAL}http: {{host: "{host}"}}\n', ServeConfig).endpoint == endpoint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replica: 2", "replica is not a known key"),
        ("prefill: {replica: 2}", "prefill.replica is not a known key; did you mean replicas?"),
        ("prefill: {replicas: 0}", "greater than or equal to 1"),
        ("http: {port: 70000}", "less than or equal to 65535"),
        ("dtype: int4", "dtype"),
        ("accelerator: gpu", "needs prefill.gpus"),
        ("decode: {gpus: 1}", "needs accelerator: gpu"),
        ("engine: {max_model_len: 8}", "set model.max_model_len instead"),
        ("engine: {kv_transfer_config: {}}", "ebbtide sets it"),
        ("engine: {speculative_config: {}}", "set speculation instead"),
        ("engine: {quantization: awq}", "set quantization instead"),
        ("quantization: int4", "int8"),
        ("quantization: fp8", "fp8 needs accelerator: gpu; take int8 or w4 on CPUs"),
        ("quantization: int8\ndtype: fp32", "quantization needs dtype: bf16"),
        ("speculation: {}", "give either method: ngram, or the URI of a draft model"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(_MINIMAL + text, ServeConfig)
