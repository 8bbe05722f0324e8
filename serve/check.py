"""What quantized weights and speculation bring, and what they cost in quality.

The same text goes through one engine after the other: the model as it is, its weights in fewer
bits, and with speculation. Formulas: perplexity = exp(-mean of the log-probabilities of all tokens
but each sequence's first); acceptance rate = accepted / guessed tokens; mean accepted length = 1 +
accepted tokens / guesses (the model itself adds a token to each). Where no data is given, the text
is sampled from the model as it is, so that the logarithm of the ratio of perplexities estimates the
Kullback-Leibler divergence from it.

Greedy answers may part where two tokens were equally likely but for rounding: one token and several
at once are not added up in the same order. Such a place is a tie, not a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ebbtide.serve.config import ServeConfig

Sequences = Sequence[Sequence[int]]

TIE_NATS = 0.05
"""Two tokens whose log-probabilities are closer than this are taken for equally likely."""
NUM_ALONE = 4
"""Prompts that are answered one at a time, for the speed that one client sees."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer, and by how many nats each token was ahead of the next best."""

    tokens: tuple[int, ...]
    leads: tuple[float, ...] = ()


@dataclass(frozen=True)
class Guesses:
    """How many times tokens were guessed, how many tokens, and how many of them stood."""

    num_drafts: int = 0
    num_tokens: int = 0
    num_accepted: int = 0


class Engine(Protocol):
    """What is measured: :class:`ebbtide.serve.check_engine.OfflineEngine`, or a fake."""

    def sample(self, count: int, length: int) -> Sequences: ...

    def logprobs(self, sequences: Sequences) -> list[float]: ...

    def greedy(self, prompts: Sequences, num_tokens: int) -> list[Answer]: ...

    def tokens_per_s(self, prompts: Sequences, num_tokens: int) -> float: ...

    def guesses(self) -> Guesses: ...


@dataclass(frozen=True)
class Text:
    """What is measured on: ``sequences`` of token ids (None: sampled), so many of such a length.

    Answers are ``length`` / 2 tokens after the first quarter of a sequence.
    """

    count: int
    length: int
    sequences: Sequences | None = None

    @property
    def num_tokens(self) -> int:
        """Those that perplexity is taken over."""
        return self.count * (self.length - 1)

    @property
    def num_prompt_tokens(self) -> int:
        return max(1, self.length // 4)

    @property
    def num_answer_tokens(self) -> int:
        return max(1, self.length // 2)


@dataclass(frozen=True)
class Measured:
    """One engine: speeds in output tokens per second, of one client and of all prompts at once."""

    perplexity: float
    tokens_per_s: float
    batch_tokens_per_s: float
    answers: tuple[Answer, ...]
    guesses: Guesses


@dataclass(frozen=True)
class Same:
    """How many answers are the same, part at a tie, and differ."""

    identical: int
    ties: int
    different: int


def variants(config: ServeConfig) -> dict[str, ServeConfig]:
    """The engines to compare, each with one thing more than the one before it."""
    plain = config.model_copy(
        update={"speculation": None, "quantization": None, "mode": "colocated"}
    )
    found = {"plain": plain}
    if config.quantization is not None:
        plain = found["quantized"] = plain.model_copy(update={"quantization": config.quantization})
    if config.speculation is not None:
        found["speculative"] = plain.model_copy(update={"speculation": config.speculation})
    return found


def measure(
    config: ServeConfig, text: Text, start: Callable[[ServeConfig], AbstractContextManager[Engine]]
) -> dict[str, Measured]:
    """Each variant's figures; one engine lives at a time."""
    found: dict[str, Measured] = {}
    sequences = text.sequences
    for name, variant in variants(config).items():
        with start(variant) as engine:
            if sequences is None:
                sequences = engine.sample(text.count, text.length)
            found[name] = _measured(engine, sequences, text)
    return found


def _measured(engine: Engine, sequences: Sequences, text: Text) -> Measured:
    prompts = [each[: text.num_prompt_tokens] for each in sequences][:16]
    num_tokens = text.num_answer_tokens
    answers = engine.greedy(prompts, num_tokens)  # first, so that the rest is warm
    before = engine.guesses()
    alone = [engine.tokens_per_s([prompt], num_tokens) for prompt in prompts[:NUM_ALONE]]
    together = engine.tokens_per_s(prompts, num_tokens)
    after = engine.guesses()
    logprobs = engine.logprobs(sequences)
    return Measured(
        perplexity=perplexity(logprobs),
        tokens_per_s=len(alone) / math.fsum(1 / each for each in alone),
        batch_tokens_per_s=together,
        answers=tuple(answers),
        guesses=Guesses(
            after.num_drafts - before.num_drafts,
            after.num_tokens - before.num_tokens,
            after.num_accepted - before.num_accepted,
        ),
    )


def perplexity(logprobs: Sequence[float]) -> float:
    """Of tokens with these log-probabilities (nats); infinite or NaN where they are not finite."""
    try:
        return math.exp(-math.fsum(logprobs) / len(logprobs))
    except OverflowError:
        return math.inf


def compare(reference: Sequence[Answer], others: Sequence[Answer]) -> Same:
    """Answers against those of a reference, whose leads say what a tie is."""
    identical = ties = 0
    for one, other in zip(reference, others, strict=True):
        pairs = zip(one.tokens, other.tokens, strict=True)
        parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parted is None:
            identical += 1
        elif parted < len(one.leads) and one.leads[parted] < TIE_NATS:
            ties += 1
    return Same(identical, ties, len(reference) - identical - ties)


def report(measured: dict[str, Measured], num_tokens: int) -> dict[str, Any]:
    """The figures as plain values: of each engine, and against the one that it is compared with."""
    plain = measured["plain"]
    result: dict[str, Any] = {"tokens": num_tokens, "plain": _figures(plain)}
    if (quantized := measured.get("quantized")) is not None:
        increase = quantized.perplexity / plain.perplexity - 1
        result["quantized"] = {
            **_figures(quantized),
            "perplexity_increase": increase if math.isfinite(increase) else None,
            "speedup": quantized.tokens_per_s / plain.tokens_per_s,
            "answers": asdict(compare(plain.answers, quantized.answers)),
        }
    if (speculative := measured.get("speculative")) is not None:
        without, guesses = quantized or plain, speculative.guesses
        result["speculative"] = {
            **_figures(speculative),
            "acceptance_rate": _ratio(guesses.num_accepted, guesses.num_tokens),
            "mean_accepted_length": 1 + (_ratio(guesses.num_accepted, guesses.num_drafts) or 0.0),
            "speedup": speculative.tokens_per_s / without.tokens_per_s,
            "answers": asdict(compare(without.answers, speculative.answers)),
        }
    return result


def _figures(measured: Measured) -> dict[str, float | None]:
    """Plain values; one that is not finite is None."""
    return {
        "perplexity": measured.perplexity if math.isfinite(measured.perplexity) else None,
        "tokens_per_s": measured.tokens_per_s,
        "batch_tokens_per_s": measured.batch_tokens_per_s,
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def fault(result: dict[str, Any], max_increase: float) -> str | None:
    """Why the endpoint should not be served like this, if there is a reason."""
    quantized, speculative = result.get("quantized"), result.get("speculative")
    for name in ("plain", "quantized", "speculative"):
        if name in result and result[name]["perplexity"] is None:
            return f"the perplexity of the model ({name}) is not finite; its weights are of no use"
    if quantized and quantized["perplexity_increase"] > max_increase:
        return (
            f"quantized weights raise the perplexity by {quantized['perplexity_increase']:.1%}, "
            f"from {result['plain']['perplexity']:.3f} to {quantized['perplexity']:.3f}; "
            f"{max_increase:.1%} is allowed: take more bits, or allow more"
        )
    if speculative and speculative["answers"]["different"]:
        return (
            f"{speculative['answers']['different']} greedy answers differ with speculation, though "
            "no two tokens were equally likely where they part"
        )
    return None
