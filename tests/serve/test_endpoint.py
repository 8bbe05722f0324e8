"""A served model as its clients see it: one ``ebbtide serve``, from its first word to Ctrl-C.

The tests run in the order of the file; the last one ends the endpoint.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ebbtide.platform.ports import free_run
from tests.serve.conftest import MODEL_NAME, Endpoint, engines
from tests.serve.tiny_model import MAX_MODEL_LEN, SYMBOLS, corpus, one_thread

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

_NEW_TOKENS = 64
_TIE = 1e-3


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=endpoint.url, api_key="none", max_retries=0, timeout=120)


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    settings = {"max_tokens": 16, "temperature": 0, **options}
    return client.completions.create(model=MODEL_NAME, prompt=prompt, **settings)


def token_ids(client: openai.OpenAI, prompt: Any, **options: Any) -> list[int]:
    answer = complete(client, prompt, extra_body={"return_token_ids": True}, **options)
    return list(answer.choices[0].token_ids)


def stream(client: openai.OpenAI, prompt: str, **options: Any) -> tuple[str, list[Any]]:
    """The joined text and the usage blocks of a streamed completion."""
    chunks = list(complete(client, prompt, stream=True, **options))
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    return text, [chunk.usage for chunk in chunks if chunk.usage is not None]


def prompts() -> list[str]:
    """Twenty stretches of text that the model was not trained on, short and long."""
    draw, data = random.Random(7), corpus(seed=1).encode()
    found = []
    for length in (4, 20, 60, 130, 180) * 4:
        start = draw.randrange(len(data) - length)
        found.append(data[start : start + length].decode(errors="ignore").strip() or "the")
    return found


def reference(folder: Path, texts: list[str]) -> list[tuple[list[int], float]]:
    """What transformers generates, and the narrowest lead of a chosen token over the next best."""
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    found = []
    with torch.no_grad(), one_thread():
        for text in texts:
            tokens = torch.tensor([tokenizer(text)["input_ids"]])
            done = model.generate(
                tokens,
                max_new_tokens=_NEW_TOKENS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            best = torch.stack([logits[0].topk(2).values for logits in done.logits])
            ids = done.sequences[0, tokens.shape[1] :].tolist()
            found.append((ids, float((best[:, 0] - best[:, 1]).min())))
    return found


def test_greedy_completions_equal_those_of_transformers(
    endpoint: Endpoint, client: openai.OpenAI
) -> None:
    texts = prompts()
    with ThreadPoolExecutor(4) as pool:  # also batched, as they come
        served = list(pool.map(lambda t: token_ids(client, t, max_tokens=_NEW_TOKENS), texts))
    left_out = 0
    for text, ids, (expected, lead) in zip(
        texts, served, reference(endpoint.model, texts), strict=True
    ):
        if lead < _TIE:
            left_out += 1
        else:
            assert ids == expected, f"{text!r} (narrowest lead {lead})"
    print(f"{left_out} of {len(texts)} prompts left out: two best logits closer than {_TIE}")
    assert left_out <= 4
    assert len(set(map(tuple, served))) > 10, "the model answers all prompts alike"


def test_the_prompts_keys_and_values_came_from_the_prefill_worker(client: openai.OpenAI) -> None:
    """The decode worker has the whole of a prompt that it never saw in its cache."""
    for length in (40, 200):
        prompt = ("unheard of " * 20)[:length]
        usage = complete(client, prompt, max_tokens=2).usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens == length
    whole = complete(client, "never before seen", max_tokens=2, n=2, temperature=1).usage
    assert not whole.prompt_tokens_details.cached_tokens


def test_several_prompts_in_one_request_are_answered_each(client: openai.OpenAI) -> None:
    texts = ["the tide", "and the crew meets the", f"{SYMBOLS} {SYMBOLS}"]
    together = complete(client, texts)
    alone = [complete(client, text).choices[0].text for text in texts]
    assert [choice.text for choice in together.choices] == alone
    assert len(set(alone)) == len(texts)


@pytest.mark.parametrize("include_usage", [True, None])
def test_a_stream_joins_to_the_same_text(client: openai.OpenAI, include_usage: bool | None) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    text, usages = stream(client, "the moon lifts", max_tokens=40, **options)
    whole = complete(client, "the moon lifts", max_tokens=40)
    assert text == whole.choices[0].text
    if include_usage:
        (usage,) = usages
        assert usage.prompt_tokens == whole.usage.prompt_tokens == len("the moon lifts")
        assert usage.completion_tokens == whole.usage.completion_tokens == 40
        assert usage.total_tokens == whole.usage.total_tokens
    else:
        assert usages == []


def test_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "the boat turns"}]
    settings: Any = {"model": MODEL_NAME, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**settings)
    text = whole.choices[0].message.content
    assert text and whole.choices[0].finish_reason == "length"
    assert whole.usage.prompt_tokens == len("the boat turns\nthe ")
    assert text == complete(client, "the boat turns\nthe ", max_tokens=24).choices[0].text
    chunks = client.chat.completions.create(**settings, stream=True)
    assert text == "".join(
        choice.delta.content or "" for chunk in chunks for choice in chunk.choices
    )


def test_characters_of_several_tokens_are_never_broken(
    endpoint: Endpoint, client: openai.OpenAI
) -> None:
    prompt = f"\n{SYMBOLS} {SYMBOLS} {SYMBOLS} "
    for max_tokens in (45, 30, 31, 32, 33):  # one symbol is 13 tokens: most ends fall inside
        body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "max_tokens": max_tokens}
        request = urllib.request.Request(
            f"{endpoint.url}/completions",
            json.dumps({**body, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            lines = [line for line in answer.read().split(b"\n") if line]
        assert lines.pop() == b"data: [DONE]"
        deltas = [json.loads(line.decode().removeprefix("data: ")) for line in lines]
        text = "".join(choice["text"] for delta in deltas for choice in delta["choices"])
        assert text == complete(client, prompt, max_tokens=max_tokens).choices[0].text
        if max_tokens == 45:
            assert SYMBOLS in text
        assert "\ufffd" not in text


def test_many_clients_at_once(client: openai.OpenAI) -> None:
    texts = [f"the {noun} {verb} the" for noun in ("tide", "gull") for verb in ("turns", "meets")]
    expected = {text: token_ids(client, text, max_tokens=20) for text in texts}
    with ThreadPoolExecutor(16) as pool:
        asked = texts * 8
        served = list(pool.map(lambda text: token_ids(client, text, max_tokens=20), asked))
    assert served == [expected[text] for text in asked]


def test_min_tokens_does_not_fail_on_the_prefill_worker(client: openai.OpenAI) -> None:
    answer = complete(client, "the", max_tokens=6, extra_body={"min_tokens": 4})
    assert answer.usage.completion_tokens == 6


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


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME


def workers(endpoint: Endpoint) -> list[psutil.Process]:
    """The engines' processes."""
    return engines(psutil.Process(endpoint.process.pid).children(recursive=True))


def test_the_workers_are_not_to_be_reached_from_outside(endpoint: Endpoint) -> None:
    found = workers(endpoint)
    assert len(found) >= 4  # an engine and a worker process for each role
    for process in found:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert ipaddress.ip_address(connection.laddr.ip).is_loopback, connection


def test_idle_workers_do_not_spin(endpoint: Endpoint) -> None:
    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in workers(endpoint))

    before_s, began_s = used_s(), time.monotonic()
    time.sleep(2.0)
    assert (used_s() - before_s) / (time.monotonic() - began_s) < 0.5  # spinning: a core each


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


def test_streams_outlive_their_worker(endpoint: Endpoint, client: openai.OpenAI) -> None:
    texts = ["the tide", "and the crew meets the", f"{SYMBOLS} "]
    options: dict[str, Any] = {"max_tokens": 200, "stream_options": {"include_usage": True}}
    expected = [stream(client, text, **options) for text in texts]
    decode: list[psutil.Process] = []
    for process in psutil.Process(endpoint.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if f"decode:{MODEL_NAME}" in " ".join(process.cmdline()):
                decode += engines(process.children(recursive=True))
    assert len(decode) == 2  # an engine and its worker
    killed = threading.Event()

    def follow(text: str) -> tuple[str, list[Any]]:
        chunks = []
        for chunk in complete(client, text, stream=True, **options):
            chunks.append(chunk)
            if len(chunks) == 20 and not killed.is_set():
                killed.set()
                decode[-1].kill()
        usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
        return "".join(c.text for chunk in chunks for c in chunk.choices), usages

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(follow, texts))
    for (text, usages), (whole, whole_usages) in zip(found, expected, strict=True):
        assert text == whole
        assert usages[0].completion_tokens == whole_usages[0].completion_tokens == 200
        assert usages[0].prompt_tokens == whole_usages[0].prompt_tokens
    metrics = urllib.request.urlopen(endpoint.url.replace("/v1", "/metrics")).read().decode()
    moved = next(
        line for line in metrics.splitlines() if line.startswith("ebbtide_moved_streams_t")
    )
    assert float(moved.split()[1]) >= 1
    assert complete(client, "the tide", max_tokens=4).usage.completion_tokens == 4  # by the other


def test_ctrl_c_leaves_nothing(endpoint: Endpoint) -> None:
    family = psutil.Process(endpoint.process.pid).children(recursive=True)
    assert len(family) > 8
    for _ in range(2):  # an impatient one
        endpoint.process.send_signal(signal.SIGINT)
    assert endpoint.process.wait(90) == 130, endpoint.log.read_text()[-3000:]
    assert "failed" not in endpoint.log.read_text()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert endpoint.process.stdout is not None and endpoint.process.stdout.read() == ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", urlsplit(endpoint.url).port))
    left = {Path("/dev/shm", name) for name in endpoint.segments() - endpoint.segments_before}
    assert not left


def test_what_is_wrong_is_said_before_anything_starts(exported: Path, tmp_path: Path) -> None:
    job = tmp_path / "serve.yaml"
    job.write_text(f"name: tide\nmodel: {{uri: {tmp_path}/nothing}}\nhttp: {{port: 1}}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used, free = f"http.port={taken.getsockname()[1]}", f"http.port={free_run(1)}"
        for overrides, message in (
            ([f"model.uri={exported}", used], "cannot listen there"),
            ([free], "no such directory"),
            ([f"model.uri={exported}", free, "decode.replicas=999"], "needs 1000 CPUs"),
            ([f"model.uri={exported}", free, "engine.max_num_seq=2"], "did you mean max_num_seqs?"),
        ):
            command = [sys.executable, "-m", "ebbtide", "serve", str(job)]
            for override in overrides:
                command += ["--set", override]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode != 0
            assert message in done.stderr
            assert done.stdout == ""
