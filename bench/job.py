"""The training job that benchmarks share: a Llama of five million parameters over made-up text."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ebbtide.train.config import TrainConfig
from ebbtide.train.prepare import PrepareConfig, prepare

VOCAB = 4096
SMALL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}  # 5 M parameters
LARGE = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 16}  # 830 M
LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}


def make_job(folder: Path, *, is_large: bool = False, **changes: Any) -> TrainConfig:
    """A job whose data, model and runs lie in ``folder``; keywords replace its sections."""
    data, model = folder / "data", folder / f"{'large' if is_large else 'small'}.json"
    if not data.exists():
        write_data(folder / "text", data)
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16} if is_large else {}
    model.write_text(json.dumps({**LLAMA, **(LARGE if is_large else SMALL), **heads}))
    values: dict[str, Any] = {
        "name": "bench",
        "storage": str(folder / "runs"),
        "steps": 20,
        "model": {"source": str(model)},
        "data": {"uri": str(data), "sequence_length": 1024 if is_large else 128},
        "batch": {"global_sequences": 16, "micro_sequences": 1},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_steps": 5},
        "validation": {"sequences": 16},
        "checkpoint": {"every_steps": 1_000_000, "keep_last": 1},
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
