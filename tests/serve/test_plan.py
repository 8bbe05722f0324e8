"""Estimates hold against arithmetic done by hand, and against what is published."""

from __future__ import annotations

import pytest

from ebbtide.serve.plan import HARDWARE, Reach, Shape, estimate, shape, table

LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
MIXTRAL = LLAMA_8B | {"num_local_experts": 8, "num_experts_per_tok": 2}
BY_NAME = {each.name: each for each in HARDWARE}


def test_keys_and_values_of_a_known_model() -> None:
    model = shape(LLAMA_8B, 8_030_000_000)
    assert model.kv_bytes_per_token == 131_072  # 128 KiB, as published for Llama 3 8B
    assert model.active_parameters == model.parameters
    assert shape(LLAMA_8B, 8_030_000_000, kv_bytes=1.0).kv_bytes_per_token == 65_536


def test_a_mixture_of_experts_computes_with_few_of_them() -> None:
    model = shape(MIXTRAL, 46_700_000_000)
    assert model.active_parameters == pytest.approx(12.9e9, rel=0.01)  # as published


def test_one_sequence_is_bound_by_reading_the_weights() -> None:
    model = Shape(8_000_000_000, 8_000_000_000, 131_072, 8)
    whole = Reach(memory=1.0, bandwidth=1.0, compute=1.0)
    context = 40_000  # 5.2 GB beside 16 GB of weights: one sequence on an L4
    found = estimate(model, BY_NAME["L4"], "bf16", context, 0.72, whole)
    assert found is not None
    assert (found.num_devices, found.num_sequences) == (1, 1)
    step_s = (16e9 + context * 131_072) / 300e9
    assert found.gap_ms == pytest.approx(step_s * 1e3)
    assert found.usd_per_million_tokens == pytest.approx(0.72 / 3600 * step_s * 1e6)


def test_what_does_not_fit_is_spread_or_left_out() -> None:
    model = shape(LLAMA_8B | {"num_hidden_layers": 80}, 70_000_000_000)
    devices = {
        name: found.num_devices
        for name in ("L4", "H100", "H200")
        if (found := estimate(model, BY_NAME[name], context=16_384)) is not None
    }
    assert devices == {"L4": 8, "H100": 4, "H200": 2}  # 140 GB of weights, 5.4 GB of keys
    assert estimate(shape(LLAMA_8B, 10**12), BY_NAME["A10G"]) is None


def test_smaller_weights_leave_more_room_and_read_less() -> None:
    model = shape(LLAMA_8B, 8_030_000_000)
    wide, narrow = (estimate(model, BY_NAME["L40S"], kind) for kind in ("bf16", "w4"))
    assert wide is not None and narrow is not None
    assert narrow.kv_tokens > wide.kv_tokens
    assert narrow.weights_gb < wide.weights_gb / 3


def test_the_table_has_the_cheapest_first_and_the_unknown_last() -> None:
    model = shape(LLAMA_8B, 8_030_000_000)
    rows = table(model, 4096, {"L4": 0.80, "H200": 4.0})
    prices = [row.usd_per_million_tokens for row in rows]
    known = [price for price in prices if price is not None]
    assert known == sorted(known) and prices[: len(known)] == known
    assert {row.hardware for row in rows if row.usd_per_million_tokens} == {"L4", "H200"}
    assert {row.hardware for row in rows} == set(BY_NAME)
    assert not any(row.weights == "fp8" for row in rows if row.hardware == "A10G")
