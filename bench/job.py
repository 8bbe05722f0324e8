"""The training job that benchmarks share: a Llama of five million parameters over made-up text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ebbtide.train.config import TrainConfig
from ebbtide.train.prepare import PrepareConfig, prepare

VOCAB = 4096
SIZES: dict[str, dict[str, int]] = {  # and tokens of a sequence
    "tiny": {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "tokens": 64},
    "small": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "tokens": 128},
    "large": {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "tokens": 1024,
    },
}
"""Of 0.6, 5.3 and 850 million parameters."""
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def make_job(folder: Path, *, size: str = "small", **changes: Any) -> TrainConfig:
    """A job whose data, model and runs lie in ``folder``; keywords replace its sections."""
    data, model = folder / "data", folder / f"{size}.json"
    if not data.exists():
        write_data(folder / "text", data)
    shape = dict(SIZES[size])
    tokens = shape.pop("tokens")
    model.write_text(json.dumps({**LLAMA, **shape}))
    values: dict[str, Any] = {
        "name": "bench",
        "storage": str(folder / "runs"),
        "steps": 20,
        "model": {"source": str(model)},
        "data": {"uri": str(data), "sequence_length": tokens},
        "batch": {"global_sequences": 16, "micro_sequences": 1},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 5},
        "validation": {"sequences": 16},
        "checkpoint": {"every": 1_000_000, "keep_last": 1},
    }
    return TrainConfig.model_validate(values | changes)


def write_data(text: Path, data: Path) -> None:
    """Prepare made-up words, 300,000 tokens or so."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 8))) for _ in range(9000)]
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(" ".join(draw.choices(words, k=5000)))
    prepare(PrepareConfig(sources=(str(text),), out=str(data), vocab_size=VOCAB))
