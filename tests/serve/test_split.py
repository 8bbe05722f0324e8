"""Where a prompt is computed: what cannot be split stays, the rest goes by length and load."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.serve.split import (
    ENOUGH,
    Load,
    better_colocated,
    can_split,
    num_prompts,
    prefill_where,
)

IDLE = Load(num_new_tokens=600, num_queued_tokens=0, num_streams=0)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"prompt": "the"}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": ["the"]}, True),
        ({"prompt": "the", "n": 1, "logprobs": 2, "echo": True}, False),
        ({"prompt": "the", "logprobs": 2}, True),
        ({"prompt": "the", "echo": True}, True),
        ({"prompt": ["the", "a"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": "the", "n": 2}, False),
        ({"prompt": "the", "n": "2"}, False),
        ({"prompt": "the", "prompt_logprobs": 0}, False),
        ({"prompt": "the", "use_beam_search": True}, False),
        ({"messages": []}, True),
    ],
)
def test_what_can_be_split(request_: dict[str, Any], expected: bool) -> None:
    assert can_split(request_) is expected
    modes = [prefill_where(request_, IDLE, mode, 512) for mode in ("split", "auto", "colocated")]
    assert modes == (["remote", "remote", "local"] if expected else ["local"] * 3)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load(511, 0, 0), "local"),
        (Load(512, 0, 0), "remote"),
        (Load(255, 0, 3), "local"),
        (Load(256, 0, 3), "remote"),  # it would hold up streams
        (Load(600, 2400, 0), "remote"),
        (Load(600, 2401, 0), "local"),  # done sooner here
        (Load(0, 0, 9), "local"),
    ],
)
def test_auto_goes_by_length_and_load(load: Load, expected: str) -> None:
    assert prefill_where({"prompt": "x"}, load, "auto", 512) == expected
    assert prefill_where({"prompt": "x"}, load, "split", 512) == "remote"


def test_num_prompts() -> None:
    assert [num_prompts(p) for p in ("a", [1, 2], ["a"], ["a", "b"], [[1], [2]], [], None)] == [
        *(1, 1, 1, 2, 2, 1, 1)
    ]


def test_a_prefill_worker_with_nothing_to_do_is_told() -> None:
    assert better_colocated(ENOUGH - 1, 0) is None
    advice = better_colocated(995, 5)
    assert advice is not None and advice.startswith("5 of 1000 prompts")
    assert better_colocated(900, 100) is None
