"""What serving a model takes on each kind of hardware: memory, speed and cost, before any of it.

Pure arithmetic over the model's shape and the hardware's published peaks, with two parts of those
peaks that engines reach (``Reach``). The bounds are the roofline's (Williams, Waterman, Patterson,
2009): a decode step reads all weights and every sequence's keys and values once, and computes two
operations per parameter and sequence; a prefill computes two per parameter and token. No figure
here is measured; measure with ``vllm bench serve`` before money depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "w4": 0.56}
"""Per parameter; 4-bit weights have a scale and a zero for each group of 128 or less."""
MAX_SEQUENCES = 256
"""What an engine runs at once, however much room there is (vLLM's ``max_num_seqs``)."""
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Hardware:
    """One device: memory in GB (10^9 bytes), GB/s of it, dense bf16 TFLOP/s, and whether FP8."""

    name: str
    memory_gb: float
    bandwidth_gb_per_s: float
    tflops: float
    has_fp8: bool = False


HARDWARE = (
    Hardware("L4", 24, 300, 121, True),
    Hardware("A10G", 24, 600, 70),
    Hardware("L20", 48, 864, 119.5, True),
    Hardware("L40S", 48, 864, 362, True),
    Hardware("A100-40GB", 40, 1555, 312),
    Hardware("A100-80GB", 80, 2039, 312),
    Hardware("H100", 80, 3350, 989, True),
    Hardware("H200", 141, 4800, 989, True),
    Hardware("MI300X", 192, 5300, 1307, True),
    Hardware("CPU", 64, 100, 2),
)
"""Vendors' data sheets; the CPU is a server's socket with 64 GB for the model."""


@dataclass(frozen=True)
class Shape:
    """What of a model counts: all parameters (``active`` of a mixture of experts), and its KV."""

    parameters: int
    active_parameters: int
    kv_bytes_per_token: int
    kv_heads: int


@dataclass(frozen=True)
class Reach:
    """Which parts of the peaks engines reach: of memory that may be filled, bandwidth, FLOP/s."""

    memory: float = 0.9
    bandwidth: float = 0.6
    compute: float = 0.5


@dataclass(frozen=True)
class Estimate:
    """One replica: its devices, the tokens that its KV cache holds, and what it does with them.

    ``num_sequences`` of the asked context run at once; ``usd_per_million_tokens`` is None where the
    price is unknown, and counts output tokens at that load.
    """

    hardware: str
    weights: str
    num_devices: int
    weights_gb: float
    kv_tokens: int
    num_sequences: int
    output_tokens_per_s: float
    gap_ms: float
    prefill_tokens_per_s: float
    usd_per_million_tokens: float | None


def shape(config: Mapping[str, Any], parameters: int, kv_bytes: float = 2.0) -> Shape:
    """Of a Hugging Face configuration of a decoder with grouped-query attention."""
    text = config.get("text_config") or config
    heads = int(text["num_attention_heads"])
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or text["hidden_size"] // heads)
    per_token = 2 * int(text["num_hidden_layers"]) * kv_heads * head_dim * kv_bytes
    return Shape(parameters, _active(text, parameters), round(per_token), kv_heads)


def _active(text: Mapping[str, Any], parameters: int) -> int:
    """The parameters that one token uses: of the experts only those that it is led to."""
    experts = text.get("num_local_experts") or text.get("num_experts")
    chosen = text.get("num_experts_per_tok")
    if not experts or not chosen:
        return parameters
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    each = 3 * int(text["hidden_size"]) * int(width) * int(text["num_hidden_layers"])
    return parameters - each * (int(experts) - int(chosen))


def estimate(
    model: Shape,
    hardware: Hardware,
    weights: str = "bf16",
    context: int = 4096,
    usd_per_hour: float | None = None,
    reach: Reach = Reach(),
) -> Estimate | None:
    """One replica on as few devices as hold the model and one sequence; None if 8 do not."""
    weight_bytes = model.parameters * WEIGHT_BYTES[weights]
    active_bytes = model.active_parameters * WEIGHT_BYTES[weights]
    for num_devices in (1, 2, 4, 8):
        room = num_devices * hardware.memory_gb * 1e9 * reach.memory - weight_bytes
        kv_tokens = max(0, math.floor(room / model.kv_bytes_per_token))
        if kv_tokens >= context:
            break
    else:
        return None
    num_sequences = min(MAX_SEQUENCES, kv_tokens // context)
    bandwidth = num_devices * hardware.bandwidth_gb_per_s * 1e9 * reach.bandwidth
    flops = num_devices * hardware.tflops * 1e12 * reach.compute
    kv_read = num_sequences * context * model.kv_bytes_per_token
    # a batch of a mixture of experts soon reads all of them
    read = min(weight_bytes, active_bytes * num_sequences) + kv_read
    step_s = max(read / bandwidth, 2 * model.active_parameters * num_sequences / flops)
    tokens_per_s = num_sequences / step_s
    usd = None
    if usd_per_hour is not None:
        usd = usd_per_hour * num_devices / SECONDS_PER_HOUR / tokens_per_s * 1e6
    return Estimate(
        hardware=hardware.name,
        weights=weights,
        num_devices=num_devices,
        weights_gb=weight_bytes / 1e9,
        kv_tokens=kv_tokens,
        num_sequences=num_sequences,
        output_tokens_per_s=tokens_per_s,
        gap_ms=step_s * 1e3,
        prefill_tokens_per_s=flops / (2 * model.active_parameters),
        usd_per_million_tokens=usd,
    )


def table(model: Shape, context: int, usd_per_hour: Mapping[str, float | None]) -> list[Estimate]:
    """Every kind of hardware with every kind of weights that it can hold, cheapest tokens first.

    ``usd_per_hour`` is by the hardware's name, for one device.
    """
    found = []
    for hardware in HARDWARE:
        for weights in WEIGHT_BYTES:
            if weights == "fp32" and hardware.name != "CPU":
                continue
            if weights == "fp8" and not hardware.has_fp8:
                continue
            one = estimate(model, hardware, weights, context, usd_per_hour.get(hardware.name))
            if one is not None:
                found.append(one)
    return sorted(
        found,
        key=lambda e: (
            e.usd_per_million_tokens is None,
            e.usd_per_million_tokens or 0.0,
            e.num_devices,
        ),
    )
