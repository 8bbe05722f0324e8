"""Speculation is checked where it enters, and said in vLLM's words."""

from __future__ import annotations

import pytest

from ebbtide.platform.config import parse
from ebbtide.platform.errors import ConfigError
from ebbtide.serve.speculation import Speculation


def test_ngrams() -> None:
    found = parse("{method: ngram, tokens: 5, min_match: 3, max_match: 6}", Speculation)
    assert found.engine_options() == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 3,
        "prompt_lookup_max": 6,
    }


def test_a_draft() -> None:
    assert parse("{draft: s3://models/small, tokens: 2}", Speculation).engine_options() == {
        "method": "draft_model",
        "model": "s3://models/small",
        "num_speculative_tokens": 2,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "give either method: ngram, or the URI of a draft model"),
        ("{method: ngram, draft: out}", "give either method: ngram, or the URI"),
        ("{method: eagle}", "ngram"),
        ("{method: ngram, tokens: 0}", "greater than or equal to 1"),
        ("{method: ngram, min_match: 5}", "min_match is more than max_match"),
        ("{draft: out, max_match: 5}", "max_match is for method: ngram"),
        ("{draft: out, token: 5}", "did you mean tokens"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text, Speculation)
