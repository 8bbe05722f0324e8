"""A served model as its clients see it: one ``ebbtide serve``.

It is the same in all of ``test_endpoint*.py``, and ended in the last of them.
"""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.conftest import MODEL_NAME, Endpoint
from tests.serve.served import complete, stream, token_ids
from tests.serve.tiny_model import SYMBOLS, corpus, one_thread

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

_NEW_TOKENS = 64
_TIE = 1e-3


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


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL_NAME]
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
