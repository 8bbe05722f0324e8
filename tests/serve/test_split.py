"""Which requests are split between the workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.serve.split import num_prompts, prefill_where


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("text", 1),
        ("", 1),
        (None, 1),
        ([], 1),
        ([5, 6, 7], 1),
        (["one"], 1),
        (["one", "two"], 2),
        ([[5], [6], [7]], 3),
    ],
)
def test_num_prompts(prompt: Any, count: int) -> None:
    assert num_prompts(prompt) == count


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"prompt": "text"}, "remote"),
        ({"messages": [{"role": "user", "content": "text"}]}, "remote"),
        ({"prompt": "text", "logprobs": 3}, "remote"),
        ({"prompt": "text", "echo": True}, "remote"),
        ({"prompt": ["one", "two"]}, "local"),
        ({"prompt": "text", "n": 2}, "local"),
        ({"messages": [], "n": 3}, "local"),
        ({"prompt": "text", "echo": True, "logprobs": 1}, "local"),
        ({"prompt": "text", "prompt_logprobs": 0}, "local"),
        ({"prompt": "text", "use_beam_search": True}, "local"),
    ],
)
def test_prefill_where(fields: dict[str, Any], where: str) -> None:
    assert prefill_where(SimpleNamespace(**{"n": 1, **fields})) == where
    if "n" not in fields:
        assert prefill_where(SimpleNamespace(**{"n": None, **fields})) == where
