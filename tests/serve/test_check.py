"""What is said of quantization and speculation follows from what engines measured."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ebbtide.platform.config import parse
from ebbtide.serve.check import (
    TIE_NATS,
    Answer,
    Guesses,
    Measured,
    Same,
    Sequences,
    Text,
    compare,
    fault,
    measure,
    perplexity,
    report,
    variants,
)
from ebbtide.serve.config import ServeConfig


def config(text: str = "") -> ServeConfig:
    return parse(f"name: tide\nmodel: {{uri: out}}\n{text}", ServeConfig)


BOTH = "quantization: int8\nspeculation: {method: ngram, tokens: 3}"


class FakeEngine:
    """Answers with the last token again; in fewer bits it is less sure, with guesses faster."""

    def __init__(self, config: ServeConfig, log: list[str]) -> None:
        self._config, self._log, self._drafts = config, log, 0

    def sample(self, count: int, length: int) -> Sequences:
        self._log.append("sample")
        return [[number] * length for number in range(count)]

    def logprobs(self, sequences: Sequences) -> list[float]:
        each = -1.1 if self._config.quantization else -1.0
        return [each for sequence in sequences for _ in sequence[1:]]

    def greedy(self, prompts: Sequences, num_tokens: int) -> list[Answer]:
        return [Answer((p[-1],) * num_tokens, (1.0,) * num_tokens) for p in prompts]

    def tokens_per_s(self, prompts: Sequences, num_tokens: int) -> float:
        self._drafts += 10
        return (200.0 if self._config.speculation else 100.0) * len(prompts)

    def guesses(self) -> Guesses:
        return Guesses(self._drafts, 3 * self._drafts, 2 * self._drafts)


def measured(text: str, asked: Text) -> tuple[dict[str, Any], list[str]]:
    log: list[str] = []

    @contextlib.contextmanager
    def start(variant: ServeConfig) -> Iterator[FakeEngine]:
        log.append(f"{variant.quantization} {variant.speculation is not None}")
        yield FakeEngine(variant, log)
        log.append("end")

    return report(measure(config(text), asked, start), asked.num_tokens), log


def test_each_engine_has_one_thing_more_than_the_one_before() -> None:
    both = variants(config(BOTH))
    assert list(both) == ["plain", "quantized", "speculative"]
    assert [each.quantization for each in both.values()] == [None, "int8", "int8"]
    assert [each.speculation is None for each in both.values()] == [True, True, False]
    assert {each.mode for each in both.values()} == {"colocated"}
    assert list(variants(config("quantization: w4"))) == ["plain", "quantized"]
    assert list(variants(config("speculation: {draft: d}"))) == ["plain", "speculative"]


def test_one_engine_lives_at_a_time_and_all_see_the_text_of_the_first() -> None:
    _, log = measured(BOTH, Text(8, 16))
    assert log == ["None False", "sample", "end", "int8 False", "end", "int8 True", "end"]
    _, log = measured(BOTH, Text(1, 4, [[1, 2, 3, 4]]))
    assert "sample" not in log


def test_figures() -> None:
    result, _ = measured(BOTH, Text(8, 16))
    assert result["tokens"] == 8 * 15
    plain, quantized, speculative = (result[n] for n in ("plain", "quantized", "speculative"))
    assert plain["perplexity"] == pytest.approx(math.e)
    assert quantized["perplexity_increase"] == pytest.approx(math.exp(0.1) - 1)
    assert quantized["answers"] == {"identical": 8, "ties": 0, "different": 0}
    assert speculative["speedup"] == pytest.approx(2.0)
    assert speculative["acceptance_rate"] == pytest.approx(2 / 3)
    assert speculative["mean_accepted_length"] == pytest.approx(3.0)


def test_quality_is_lost_past_the_bound_and_only_there() -> None:
    result, _ = measured(BOTH, Text(8, 16))
    assert "from 2.718 to 3.004" in str(fault(result, 0.10))
    assert fault(result, 0.11) is None


@pytest.mark.parametrize("logprobs", [[-1e6, -1e6], [math.nan, -1.0], [-math.inf, -1.0]])
@pytest.mark.parametrize("which", ["plain", "quantized", "speculative"])
def test_a_perplexity_that_is_not_finite_is_a_fault_of_any_engine(
    logprobs: list[float], which: str
) -> None:
    assert not math.isfinite(perplexity(logprobs))
    one = Measured(3.0, 1.0, 1.0, (Answer((1,)),), Guesses())
    broken = replace(one, perplexity=perplexity(logprobs))
    all_three = dict.fromkeys(("plain", "quantized", "speculative"), one) | {which: broken}
    result = report(all_three, 10)
    json.dumps(result, allow_nan=False)
    assert f"the perplexity of the model ({which}) is not finite" in str(fault(result, 1e9))


def test_answers_that_differ_with_speculation_are_a_fault_but_not_those_of_fewer_bits() -> None:
    result, _ = measured(BOTH, Text(8, 16))
    result["quantized"]["answers"]["different"] = 5
    assert fault(result, 1.0) is None
    result["speculative"]["answers"]["different"] = 1
    assert "1 greedy answers differ" in str(fault(result, 1.0))


def test_answers_may_part_where_two_tokens_were_equally_likely() -> None:
    one = Answer((1, 2, 3), (1.0, TIE_NATS / 2, 1.0))
    others = [Answer((1, 2, 3)), Answer((1, 9, 9)), Answer((1, 2, 9)), Answer((9, 2, 3))]
    assert compare([one] * 4, others) == Same(identical=1, ties=1, different=2)
    assert compare([Answer((1, 2))], [Answer((1, 3))]) == Same(0, 0, 1), "no leads, no ties"
