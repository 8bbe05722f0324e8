"""vLLM's engine without a server, for what ``ebbtide serve check`` measures. Imports vLLM."""

from __future__ import annotations

import dataclasses
import time
from types import TracebackType
from typing import Any

from vllm import LLM, EngineArgs, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from ebbtide.platform.errors import ServeError
from ebbtide.serve.check import Answer, Guesses, Sequences
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.engine import engine_options
from ebbtide.serve.local_model import prepared
from ebbtide.serve.startup import reason

_SERVED_ONLY = "kv_transfer_config"
_SPECULATIVE = "vllm:spec_decode_num_"


class OfflineEngine:
    """One decode worker's engine in processes of its own; a context manager that ends them.

    Raises ServeError when the engine does not start, or dies.
    """

    def __init__(self, config: ServeConfig) -> None:
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        options = engine_options(config, "decode")
        options = {k: v for k, v in options.items() if k in known and k != _SERVED_ONLY}
        if config.speculation is not None and config.speculation.draft is not None:
            draft = str(prepared(config.speculation.draft, None))
            options["speculative_config"] = {**options["speculative_config"], "model": draft}
        # prompts come again; their second time is to be as slow as the first
        options |= {"enable_prefix_caching": False, "disable_log_stats": False}
        model = str(prepared(config.model.uri, config.quantization))
        try:
            self._llm = LLM(model=model, **options)
        except Exception as error:
            raise ServeError(f"the engine does not start: {reason(error, '')}") from error

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def sample(self, count: int, length: int) -> Sequences:
        """So many sequences of the model's own, from its first token on."""
        described = self._llm.model_config.hf_config
        first = next(
            (i for i in (described.bos_token_id, described.eos_token_id) if isinstance(i, int)), 0
        )
        asked = [
            SamplingParams(temperature=1.0, max_tokens=length - 1, ignore_eos=True, seed=number)
            for number in range(count)
        ]
        done = self._generate([[first]] * count, asked)
        return [[first, *each.outputs[0].token_ids] for each in done]

    def logprobs(self, sequences: Sequences) -> list[float]:
        """Of every token but each sequence's first, in nats."""
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        found = []
        for each in self._generate(sequences, asked):
            for token, of_token in zip(each.prompt_token_ids, each.prompt_logprobs, strict=True):
                if of_token is not None:  # there is none for the first
                    found.append(float(of_token[token].logprob))
        return found

    def greedy(self, prompts: Sequences, num_tokens: int) -> list[Answer]:
        """The most likely answers, and by how much each token was ahead of the next best."""
        done = self._generate(prompts, _greedy(num_tokens, logprobs=2))
        return [
            Answer(tuple(each.outputs[0].token_ids), tuple(map(_lead, each.outputs[0].logprobs)))
            for each in done
        ]

    def tokens_per_s(self, prompts: Sequences, num_tokens: int) -> float:
        """Of all prompts at once, prefill included."""
        began_s = time.perf_counter()
        self._generate(prompts, _greedy(num_tokens))
        return len(prompts) * num_tokens / (time.perf_counter() - began_s)

    def guesses(self) -> Guesses:
        """What has been guessed so far."""
        values = {
            metric.name.removeprefix(_SPECULATIVE): int(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name.startswith(_SPECULATIVE) and hasattr(metric, "value")
        }
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return Guesses(*(values.get(name, 0) for name in names))

    def _generate(self, prompts: Sequences, asked: Any) -> list[Any]:
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        try:
            return self._llm.generate(given, asked, use_tqdm=False)  # type: ignore[no-any-return]
        except EngineDeadError as error:
            raise ServeError(f"the engine died; its log is above: {reason(error, '')}") from error


def _greedy(num_tokens: int, logprobs: int | None = None) -> Any:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=logprobs)


def _lead(of_token: Any) -> float:
    best = sorted((each.logprob for each in of_token.values()), reverse=True)
    return float(best[0] - best[1]) if len(best) > 1 else float("inf")
