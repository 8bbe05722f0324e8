"""What tests ask of a served model, and what they know of its processes."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

from ebbtide.platform import process_session
from tests.serve.conftest import MODEL_NAME, Endpoint, engines


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


def workers(endpoint: Endpoint, role: str = "") -> list[psutil.Process]:
    """The engines' processes, of one role or of both."""
    found: list[psutil.Process] = []
    for replica in replicas(endpoint, role):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += engines(family(replica.pid))
    return found


def family(pid: int) -> list[psutil.Process]:
    """All processes below one, forked ones too."""
    found = []
    for each in process_session.descendants(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(each))
    return found


def replicas(endpoint: Endpoint, role: str = "") -> list[psutil.Process]:
    """The processes of Ray Serve's replicas that have an engine, of one role or of both."""
    found = []
    for process in family(endpoint.process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if command.startswith("ray::") and f"{role}:{MODEL_NAME}" in command:
                found.append(process)
    return found


def measured(endpoint: Endpoint) -> dict[str, float]:
    """The router's metrics by name and labels."""
    text = urllib.request.urlopen(endpoint.url.replace("/v1", "/metrics")).read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def ready(endpoint: Endpoint) -> dict[str, Any]:
    """How many workers of each role get requests."""
    try:
        found = urllib.request.urlopen(endpoint.url.replace("/v1", "/ready"), timeout=10).read()
    except urllib.error.HTTPError as error:
        found = error.read()
    return dict(json.loads(found))


def until(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """Wait for a condition; the seconds that it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s, what
        time.sleep(0.1)
    return time.monotonic() - began_s
