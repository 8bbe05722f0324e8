"""Bitwise the same run for any history of world sizes, and the arithmetic behind it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ebbtide.platform.errors import TrainingError
from ebbtide.train.exact import Node, add_up, exact_norm, nodes_within
from ebbtide.train.generation import Generation
from tests.train.conftest import MakeConfig, Tiny
from tests.train.ranks import Ranks, Trace, train
from tests.train.test_loop import USER_CODE, Spans, history, same_run

MIXED: Spans = [(4, 2), (2, 4), (3, 5), (1, 6), (4, None)]
WORLDS: dict[str, Spans] = {f"w{size}": [(size, None)] for size in (1, 2, 3, 4)}


@given(st.integers(1, 70), st.integers(1, 9))
def test_the_tree_does_not_depend_on_the_ranks(micro_batches: int, world_size: int) -> None:
    gradients = torch.rand(micro_batches, generator=torch.Generator().manual_seed(micro_batches))

    def partial(first: int, stop: int) -> dict[Node, Tensor]:
        return {
            node: add_up({(0, i): gradients[at + i].clone() for i in range(size)}, size)
            for node in nodes_within(first, stop)
            for at in [node[1] << node[0]]
            for size in [min(1 << node[0], stop - at)]
        }

    alone = add_up(partial(0, micro_batches), micro_batches)
    nodes: dict[Node, Tensor] = {}
    for rank in range(world_size):
        generation = Generation(0, rank, world_size, 0, None)
        nodes |= partial(*generation.span(micro_batches, rank))
    assert torch.equal(add_up(nodes, micro_batches), alone)
    assert float(alone) == pytest.approx(float(gradients.double().sum()), rel=1e-5)


@given(st.integers(0, 50), st.integers(0, 50))
def test_nodes_cover_a_span_once_and_are_few(first: int, length: int) -> None:
    nodes = nodes_within(first, first + length)
    covered = [i for level, index in nodes for i in range(index << level, (index + 1) << level)]
    assert covered == list(range(first, first + length))
    assert len(nodes) <= 2 * max(1, length).bit_length()


def norms(parts: list[Tensor]) -> tuple[float, float]:
    part = parts[dist.get_rank()]
    return exact_norm([part, torch.zeros(0)]), float(part.abs().max())


def test_the_norm_has_the_same_bits_however_it_is_cut(ranks: Ranks) -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0)) * 1e-3
    whole, _ = ranks.run(1, norms, [values])[0]
    assert whole == pytest.approx(float(values.double().norm()), rel=1e-6)
    for cuts in ([1, 50_000], [17, 33, 99_000]):
        parts = [part.clone() for part in torch.tensor_split(values, cuts)]
        assert {norm for norm, _ in ranks.run(len(parts), norms, parts)} == {whole}
    for bad in (math.nan, math.inf, -math.inf):
        values[7] = bad
        assert ranks.run(2, norms, [values, torch.ones(3)])[1][0] == math.inf
    assert ranks.run(2, norms, [torch.zeros(3), torch.zeros(1)])[0][0] == 0
    assert ranks.run(1, norms, [torch.full((3,), 1e-40)])[0][0] == pytest.approx(1.7e-40, rel=0.1)


def bits(trace: Trace) -> list[Any]:
    steps = [(s.step, s.loss.hex(), s.grad_norm.hex(), s.lr, s.digests) for s in trace.steps]
    return [*steps, *((step, loss.hex()) for step, loss in trace.validations)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_history_has_the_same_bits(
    ranks: Ranks, make_config: MakeConfig, tiny: Tiny, tmp_path: Path, precision: str
) -> None:
    """Seven micro-batches: uneven for every world; rows of the model that fill vectors or not."""
    model = json.loads(Path(tiny.model).read_text())
    source = tmp_path / "config.json"
    source.write_text(json.dumps(model | {"hidden_size": 48, "tie_word_embeddings": False}))
    batch = {"global_sequences": 14, "micro_sequences": 2}

    def run(name: str, spans: Spans, **changes: Any) -> Trace:
        values: dict[str, Any] = {
            "steps": 8,
            "batch": batch,
            "precision": precision,
            "digest": True,
            "model": {"source": str(source)},
            "validation": {"every_steps": 4},
        }
        return history(ranks, make_config(name=name, **values | changes), spans)

    alone = run("w1", WORLDS["w1"])
    assert len(alone.steps[0].digests) == 4 * 21  # parameters and three slots of each
    for name, spans in (WORLDS | {"mixed": MIXED}).items():
        if name != "w1":
            assert bits(run(name, spans)) == bits(alone), name
    plain = run("plain", WORLDS["w2"], reduction="plain")
    same_run(plain, alone, rel=1e-5 if precision == "fp32" else 1e-4)


def test_dropout_and_a_model_of_ones_own_have_the_same_bits(
    ranks: Ranks, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "user_code_of_exact_test.py").write_text(USER_CODE)
    model = {"factory": "user_code_of_exact_test:net", "loss": "user_code_of_exact_test:smoothed"}

    def run(name: str, spans: Spans) -> Trace:
        config = make_config(name=name, steps=6, digest=True, model=model | {"source": None})
        return history(ranks, config, spans, folder=str(tmp_path))

    alone = run("w1", WORLDS["w1"])
    assert bits(run("w4", WORLDS["w4"])) == bits(alone)
    assert bits(run("mixed", [(3, 2), (2, None)])) == bits(alone)


def test_a_gradient_that_is_not_finite_ends_the_run_on_every_rank(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    config = make_config(optimizer={"lr": 1e30}, schedule={"warmup_steps": 0})
    with pytest.raises(TrainingError, match=r"step \d+: the loss is"):
        ranks.run(3, train, config)
