"""A dataset and a model small enough to train in a second, and ranks to train them on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from ebbtide.train import controller
from ebbtide.train.config import TrainConfig
from ebbtide.train.desk import Desk
from ebbtide.train.prepare import PrepareConfig, prepare
from tests.train.ranks import Ranks

MakeConfig = Callable[..., TrainConfig]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four processes that form gloo groups of any size up to that."""
    pool = Ranks()
    yield pool
    pool.close()


@dataclass(frozen=True)
class Tiny:
    """URIs of a prepared dataset and of a model's config.json."""

    data: str
    model: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Some thousand tokens of made-up words, and a 2-layer llama of 45,000 parameters.

    Its sizes are divisible by hardly any number of ranks.
    """
    folder = tmp_path_factory.mktemp("tiny")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(60)]
    text = folder / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.txt").write_text(" ".join(draw.choices(words, k=200)))
    data = folder / "data"
    prepare(
        PrepareConfig(sources=(str(text),), out=str(data), vocab_size=300, validation_fraction=0.2)
    )
    model = folder / "config.json"
    model.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "vocab_size": 301,
                "hidden_size": 40,
                "intermediate_size": 94,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            }
        )
    )
    return Tiny(str(data), str(model))


@pytest.fixture
def make_config(tiny: Tiny, tmp_path: Path) -> MakeConfig:
    """A job over the tiny dataset; keywords replace sections, dictionaries are merged into them."""

    def make(**changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "name": "run",
            "storage": str(tmp_path / "runs"),
            "seed": 1,
            "steps": 12,
            "model": {"source": tiny.model},
            "data": {"uri": tiny.data, "sequence_length": 32},
            "batch": {"global_sequences": 8, "micro_sequences": 2},
            "optimizer": {"lr": 3e-3},
            "schedule": {"warmup_steps": 1},
            "validation": {"every_steps": 6, "sequences": 7},
            "checkpoint": {"every": 100},
        }
        for name, value in changes.items():
            merged = isinstance(value, dict) and isinstance(values.get(name), dict)
            values[name] = values[name] | value if merged else value
        return TrainConfig.model_validate(values)

    return make


class Remote:
    """A plain object with the calling form of an actor; calls happen at once."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> Any:
                return method(*arguments)

        return Method


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A desk without an actor around it, which the controller's side finds."""
    desk = Desk()
    monkeypatch.setattr(controller, "find_desk", lambda _: Remote(desk))
    monkeypatch.setattr(ray, "get", lambda value, **_: value)
    yield desk
