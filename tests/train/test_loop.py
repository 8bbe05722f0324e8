"""The same run for any number of ranks and any history, and what ends it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbtide.platform.errors import ConfigError, TrainingError
from ebbtide.platform.storage import open_storage
from ebbtide.train.checkpoint import list_checkpoints, read_model_state
from tests.train.conftest import MakeConfig
from tests.train.ranks import Ranks, Trace, first, train

USER_CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(32, vocab_size)
        self.scales = nn.Parameter(torch.ones(2))  # fewer rows than ranks

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) * self.scales.prod()

def net(vocab_size):
    return Net(vocab_size)

def smoothed(logits, labels):
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1
    )

def mean(logits, labels):
    return (logits.sum(-1) * labels).mean(0)
"""


Spans = list[tuple[int, int | None]]


def losses(trace: Trace) -> list[float]:
    return [step.loss for step in trace.steps]


def same_run(one: Trace, other: Trace, rel: float = 1e-5) -> None:
    assert [s.step for s in one.steps] == [s.step for s in other.steps]
    assert [s.sample_ids for s in one.steps] == [s.sample_ids for s in other.steps]
    assert [(s.lr, s.tokens, s.epoch) for s in one.steps] == [
        (s.lr, s.tokens, s.epoch) for s in other.steps
    ]
    assert losses(one) == pytest.approx(losses(other), rel=rel)
    assert [s.grad_norm for s in one.steps] == pytest.approx(
        [s.grad_norm for s in other.steps], rel=10 * rel
    )
    assert [step for step, _ in one.validations] == [step for step, _ in other.validations]
    assert [loss for _, loss in one.validations] == pytest.approx(
        [loss for _, loss in other.validations], rel=rel
    )


def history(ranks: Ranks, config: Any, spans: Spans, **kw: Any) -> Trace:
    """Generations of (world size, step after which it leaves), as one trace."""
    parts = []
    for number, (world_size, leave_after) in enumerate(spans):
        how = config, leave_after, kw.get("folder"), number
        parts.append(first(ranks.run(world_size, train, *how)))
    whole = parts[-1]
    return replace(
        whole,
        steps=[step for part in parts for step in part.steps],
        validations=[one for part in parts for one in part.validations],
        saved=[info for part in parts for info in part.saved],
    )


def test_world_size_and_history_leave_the_run_as_it_is(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    alone = history(ranks, make_config(name="w1"), [(1, None)])
    assert losses(alone)[-1] < losses(alone)[0] - 0.5
    assert alone.outcome.status == "finished"
    assert [step for step, _ in alone.validations] == [6, 12]
    for world_size in (2, 3):  # 4 micro-batches: even, and with surplus passes
        same_run(history(ranks, make_config(name=f"w{world_size}"), [(world_size, None)]), alone)
    # 3 -> 1 -> 2, leaving at a step where a validation is due, which is then made up for
    mixed = history(ranks, make_config(name="mixed"), [(3, 4), (1, 6), (2, None)])
    same_run(mixed, alone)
    assert [info.step for info in mixed.saved] == [4, 6, 12]
    # the one before was killed before it had saved
    same_run(first(ranks.run(1, train, make_config(name="again"), None, None, 1)), alone, rel=0)


def test_saving_by_the_clock_is_agreed_on_and_changes_no_bit(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    seldom = make_config(name="seldom", steps=30, digest=True)
    often = make_config(name="often", steps=30, digest=True, checkpoint={"every": "0.1s"})
    undisturbed = first(ranks.run(1, train, seldom))
    traces = ranks.run(3, train, often)
    assert [s.digests for s in traces[0].steps] == [s.digests for s in undisturbed.steps]
    steps = [info.step for info in traces[0].saved]
    assert len(steps) > 2 and steps[-1] == 30
    assert all([info.step for info in trace.saved] == steps for trace in traces)


def test_ranks_beyond_the_validation_set_have_nothing_to_add(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    # 7 sequences in micro-batches of 4 for 3 ranks: a short one, and a rank without any
    changes: dict[str, Any] = {
        "steps": 1,
        "batch": {"global_sequences": 16, "micro_sequences": 4},
        "validation": {"sequences": 7},
    }
    one = history(ranks, make_config(name="w1", **changes), [(1, None)])
    three = history(ranks, make_config(name="w3", **changes), [(3, None)])
    assert three.validations[0][1] == pytest.approx(one.validations[0][1], rel=1e-6)
    split = make_config(name="m1", **changes | {"batch": {"global_sequences": 16}})
    other = history(ranks, split, [(3, None)])
    assert other.validations[0][1] == pytest.approx(one.validations[0][1], rel=1e-5)


def test_users_model_and_loss_with_dropout(
    ranks: Ranks, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "user_code_of_loop_test.py").write_text(USER_CODE)
    model = {"factory": "user_code_of_loop_test:net", "loss": "user_code_of_loop_test:smoothed"}
    w1: Spans = [(1, None)]
    mixed: Spans = [(3, 2), (2, None)]
    traces = [
        history(
            ranks,
            make_config(name=name, steps=6, model=model | {"source": None}),
            spans,
            folder=str(tmp_path),
        )
        for name, spans in (("w1", w1), ("mixed", mixed))
    ]
    same_run(traces[1], traces[0])
    assert traces[0].outcome.status == "finished"
    wrong = make_config(model=model | {"source": None, "loss": "user_code_of_loop_test:mean"})
    with pytest.raises(TrainingError, match=r"user_code_of_loop_test:mean.*scalar.*\(32,\)"):
        ranks.run(1, train, wrong, None, str(tmp_path))


def test_bf16_and_activation_checkpointing(ranks: Ranks, make_config: MakeConfig) -> None:
    plain = make_config(steps=4, name="plain")
    kept = losses(history(ranks, plain, [(2, None)]))
    again = plain.model_copy(
        update={
            "name": "again",
            "model": plain.model.model_copy(update={"activation_checkpointing": True}),
        }
    )
    assert losses(history(ranks, again, [(2, None)])) == kept
    half = losses(history(ranks, make_config(steps=4, name="h", precision="bf16"), [(2, None)]))
    assert half != kept
    assert half == pytest.approx(kept, rel=0.02)


def test_what_is_not_finite_ends_the_run_and_is_not_saved(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    config = make_config(
        optimizer={"lr": 1e30},
        schedule={"warmup_steps": 0},
        checkpoint={"every": 1, "keep_last": 2},
    )
    with pytest.raises(TrainingError, match=r"step \d+: .*(nan|inf|not finite)"):
        ranks.run(2, train, config)
    found = list_checkpoints(open_storage(config.run_uri))
    assert len(found) <= 2
    for info in found:
        if info.state == "complete":
            _, tensors = read_model_state(info.uri)
            assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_a_finished_run_is_finished(ranks: Ranks, make_config: MakeConfig) -> None:
    config = make_config(steps=2)
    done = history(ranks, config, [(1, None)]).outcome
    again = history(ranks, config, [(2, None)])
    assert again.steps == [] and again.saved == []
    assert again.outcome == done
    assert done.step == 2 and math.isfinite(done.validation_loss)


def test_a_model_that_does_not_fit_the_data(ranks: Ranks, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="no module named|No module named"):
        ranks.run(2, train, make_config(model={"source": None, "factory": "nowhere:net"}))
