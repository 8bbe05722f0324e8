"""Speculative decoding: tokens that are guessed cheaply, and checked several at a time.

The guesses come from the text so far (``ngram``: what followed the same tokens before) or from a
smaller model (``draft``). The model itself decides which of them stand, so that answers have the
same distribution as without, and greedy ones are the same (Leviathan et al., 2023). Of vLLM's
methods these two work with every model, on CPUs and GPUs, and beside the hand-over of keys and
values; others need weights that were trained for one model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ebbtide.platform.config import Config

Match = Annotated[int, Field(ge=1, le=64)]


class Speculation(Config):
    """How tokens are guessed: ``method: ngram``, or the exported model at ``draft``.

    ``tokens`` are guessed for each step. ``ngram`` looks for the last ``max_match`` tokens, then
    for fewer, down to ``min_match``.
    """

    method: Literal["ngram"] | None = None
    draft: Annotated[str, Field(min_length=1)] | None = None
    tokens: Annotated[int, Field(ge=1, le=32)] = 4
    min_match: Match = 2
    max_match: Match = 4

    @model_validator(mode="after")
    def _one_of_them(self) -> Speculation:
        if (self.method is None) == (self.draft is None):
            raise ValueError("give either method: ngram, or the URI of a draft model")
        given = sorted(self.model_fields_set & {"min_match", "max_match"})
        if self.draft is not None and given:
            raise ValueError(f"{given[0]} is for method: ngram; a draft model matches nothing")
        if self.min_match > self.max_match:
            raise ValueError("min_match is more than max_match")
        return self

    def engine_options(self) -> dict[str, Any]:
        """vLLM's ``speculative_config``; a draft's ``model`` is still its URI."""
        options: dict[str, Any] = {"num_speculative_tokens": self.tokens}
        if self.draft is not None:
            return {**options, "method": "draft_model", "model": self.draft}
        return {
            **options,
            "method": "ngram",
            "prompt_lookup_min": self.min_match,
            "prompt_lookup_max": self.max_match,
        }
