"""What a stream's chunks become, where no worker is needed to see it."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.serve.stream import Stream, bound_by, stop_strings

HEAD = {"id": "a", "object": "text_completion", "created": 1, "model": "m"}


def chunk(text: str, *ids: int, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "token_ids": list(ids), "finish_reason": None, **fields}
    return {**HEAD, "choices": [choice]}


def stream(**request: Any) -> Stream:
    return Stream("completion", {"prompt": "x", "temperature": 0, "max_tokens": 9, **request}, 99)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"prompt": "x", "max_tokens": 3, "temperature": 0.5, "seed": 1, "stop": ["a"]}, None),
        ({"messages": [], "max_completion_tokens": 3, "tool_choice": "none"}, None),
        ({"prompt": "x", "n": 1, "echo": False, "frequency_penalty": 0.0}, None),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": "x", "frequency_penalty": 0.1}, "frequency_penalty"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [], "tools": [{}]}, "tools"),
        ({"prompt": "x", "logprobs": 1}, "logprobs"),
        ({"prompt": "x", "logprobs": 0}, "logprobs"),
        ({"messages": [], "logprobs": False}, None),
        ({"prompt": "x", "seed": "1"}, "seed"),
        ({"prompt": "x", "vllm_xargs": {}}, "vllm_xargs"),
    ],
)
def test_what_binds_an_answer_to_its_worker(request_: dict[str, Any], expected: Any) -> None:
    assert bound_by(request_) == expected


def test_stop_strings_are_ours_unless_they_are_to_be_kept() -> None:
    assert stop_strings({"stop": "a"}) == ["a"]
    assert stop_strings({"stop": ["a", ""]}) == ["a"]
    assert stop_strings({"stop": ["a"], "include_stop_str_in_output": True}) == []
    assert stop_strings({"stop": None}) == []


def test_a_continuation_asks_for_what_is_left() -> None:
    it = stream(seed=7, min_tokens=3, stop="!", kv_transfer_params=None)
    it.take(chunk("a", 11, prompt_token_ids=[1, 2]))
    it.take(chunk("", 12))  # a part of a character
    path, body = it.move()
    assert path == "/v1/completions"
    assert body["prompt"] == [1, 2, 11]
    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (8, 2, 8)
    assert body["include_stop_str_in_output"] is True and body["stop"] == "!"
    assert "kv_transfer_params" not in body


def test_a_chat_without_a_limit_may_fill_the_model() -> None:
    it = Stream("chat", {"messages": [], "temperature": 0}, 99)
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    it.take({**HEAD, "prompt_token_ids": [1, 2], "choices": [choice]})
    it.take({**HEAD, "choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [5]}]})
    path, body = it.move()
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", [1, 2, 5], 96)


def test_several_tokens_at_once_are_generated_again_since_the_last_may_be_a_part() -> None:
    it = stream()
    it.take(chunk("a", 11, prompt_token_ids=[1]))
    it.take(chunk("b", 12, 13))
    assert it.move()[1]["prompt"] == [1, 11]
    assert it.take(chunk("b", 12)) is None  # the client has it
    shown = it.take(chunk("é", 13, 14))
    assert shown is not None and shown["choices"][0]["text"] == "é"
    assert it.num_tokens == 4


def test_a_sampled_stream_keeps_its_tokens() -> None:
    it = stream(temperature=1)
    it.take(chunk("a", 11, prompt_token_ids=[1]))
    it.take(chunk("b", 12, 13))
    assert it.can_move and it.move()[1]["prompt"] == [1, 11, 12, 13]
    shown_ids = stream(temperature=1, return_token_ids=True)
    shown_ids.take(chunk("a", 11, prompt_token_ids=[1]))
    shown_ids.take(chunk("", 12))
    assert not shown_ids.can_move  # the client has a token that would be drawn again


def test_output_that_was_parsed_binds_it() -> None:
    it = Stream("chat", {"messages": [], "temperature": 0}, 99)
    delta = {"reasoning": "hm"}
    it.take({**HEAD, "prompt_token_ids": [1], "choices": [{"index": 0, "delta": delta}]})
    assert not it.can_move


def test_what_is_owed_after_the_end() -> None:
    it = stream(stream_options={"include_usage": True})
    it.take(chunk("a", 11, prompt_token_ids=[1]))
    it.take(chunk("b", 12, finish_reason="length"))
    (usage,) = it.owed()
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert usage["choices"] == [] and usage["id"] == "a"
    assert stream().owed() == []
