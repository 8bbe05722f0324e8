"""Requests that an endpoint refuses, and that none makes it fail."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.serve.conftest import MODEL_NAME, Endpoint
from tests.serve.served import complete, token_ids
from tests.serve.tiny_model import MAX_MODEL_LEN

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

_LONGEST = MAX_MODEL_LEN - 1
_BAD: list[tuple[str, dict[str, Any], int]] = [
    ("at the limit", {"prompt": [5] * MAX_MODEL_LEN, "max_tokens": 1}, 400),
    ("above the limit", {"prompt": [5] * (MAX_MODEL_LEN + 1), "max_tokens": 1}, 400),
    ("sum above the limit", {"prompt": [5] * 200, "max_tokens": 100}, 400),
    ("empty", {"prompt": ""}, 400),
    ("empty list", {"prompt": []}, 400),
    ("one of two empty", {"prompt": ["the", ""]}, 400),
    ("no prompt", {}, 400),
    ("negative max_tokens", {"prompt": "the", "max_tokens": -1}, 400),
    ("unknown model", {"prompt": "the", "model": "nobody"}, 404),
    ("token beyond the vocabulary", {"prompt": [100_000]}, 400),
    ("negative token", {"prompt": [-1]}, 400),
    ("negative temperature", {"prompt": "the", "temperature": -1}, 400),
    ("wrong type", {"prompt": "the", "stop": [1]}, 400),
    ("empty stop", {"prompt": "the", "stop": [""]}, 400),
    ("too many logprobs", {"prompt": "the", "logprobs": 1000}, 400),
    ("min above max", {"prompt": "the", "max_tokens": 2, "extra_body": {"min_tokens": 3}}, 400),
]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_bad_requests_are_refused_in_the_envelope(client: openai.OpenAI, is_stream: bool) -> None:
    for name, request, status in _BAD:
        settings: dict[str, Any] = {"model": MODEL_NAME, "prompt": openai.NOT_GIVEN, **request}
        try:
            done = client.completions.create(**settings, stream=is_stream)
            pytest.fail(f"{name}: {list(done) if is_stream else done}")
        except openai.APIStatusError as refused:
            assert refused.status_code == status, f"{name}: {refused}"
            error = refused.response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, name
        assert error["type"] == "invalid_request_error" and error["message"], name
        assert not any(word in str(error) for word in ("Traceback", "ray::", "vllm.")), error
    assert complete(client, [5] * _LONGEST, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"[]", 400),
        ("POST", "/v1/chat/completions", b'{"model": "tide"}', 400),
        ("POST", "/v1/chat/completions", b'{"model": "no", "messages": []}', 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/v1/models/nobody", None, 404),
        ("GET", "/nowhere", None, 404),
    ],
)
def test_what_is_no_request_is_refused_in_the_envelope(
    endpoint: Endpoint, method: str, path: str, body: bytes | None, status: int
) -> None:
    url = endpoint.url.removesuffix("/v1") + path
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == status
    assert json.loads(caught.value.read())["error"]["message"]


def test_fields_between_workers_are_not_for_clients(client: openai.OpenAI) -> None:
    plain = token_ids(client, "the gull holds")
    meddling = {"do_remote_prefill": True, "remote_block_ids": [0], "remote_engine_id": "x"}
    body = {"kv_transfer_params": meddling, "request_id": "mine", "return_token_ids": True}
    for _ in range(2):
        answer = complete(client, "the gull holds", extra_body=body)
        assert list(answer.choices[0].token_ids) == plain


_FIELDS = (
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "seed",
    "logprobs",
) + (
    *("min_tokens", "echo", "stream", "stream_options", "logit_bias", "presence_penalty", "suffix"),
    *("best_of", "user", "response_format", "stop_token_ids", "allowed_token_ids", "bad_words"),
    *("prompt_logprobs", "truncate_prompt_tokens", "repetition_penalty", "priority", "min_p"),
    *("return_token_ids", "add_special_tokens", "messages", "structured_outputs", "cache_salt"),
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    0.5,
    -0.5,
    1e300,
    2**63,
    -(2**63),
    "",
    "x",
) + (
    *("the", [], [0], [-1], [1, "a"], ["the"], ["", "x"], [[1]], [[]], [None], {}, {"a": 1}),
    *({"0": 1}, {"5": 101}, {"include_usage": True}, {"type": "json_object"}, {"type": "x"}),
    *({"type": "json_schema"}, [5] * 300, "x" * 300, "\x00", "\ud7ff\uffff", [{"role": "user"}]),
)


def test_no_request_makes_it_fail(endpoint: Endpoint, client: openai.OpenAI) -> None:
    def ask(number: int) -> tuple[int, dict[str, Any]]:
        draw = random.Random(number)
        body: dict[str, Any] = {"prompt": "the", "max_tokens": 2}
        body |= {draw.choice(_FIELDS): draw.choice(_VALUES) for _ in range(draw.randint(1, 3))}
        path = draw.choice(("completions", "completions", "chat/completions"))
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{endpoint.url}/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
                return answer.status, body
        except urllib.error.HTTPError as refused:
            error = json.loads(refused.read())["error"]
            assert error["type"] and error["message"], body
            return refused.code, body

    with ThreadPoolExecutor(8) as pool:
        answered = list(pool.map(ask, range(400)))
    assert [each for each in answered if each[0] >= 500] == []
    assert {200, 400} <= {status for status, _ in answered}
    assert complete(client, "the", max_tokens=4).usage.completion_tokens == 4
