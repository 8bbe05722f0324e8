"""A trained model, and an endpoint that serves it as a user would start it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own
import pytest

from ebbtide.platform import node_memory
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.ports import free_run
from ebbtide.platform.storage import open_storage
from tests.serve.tiny_model import MAX_MODEL_LEN, write_export, write_other

MODEL_NAME = "tide"

_START_LIMIT_S = 540.0
_STOP_LIMIT_S = 60.0


@dataclass
class Endpoint:
    """``ebbtide serve``: the process, its endpoint and log, the model, /dev/shm before it, and
    another model's address."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    model: Path
    segments_before: set[str]
    other_uri: str = ""

    @staticmethod
    def segments() -> set[str]:
        return shared_memory()


def shared_memory() -> set[str]:
    """The names of the machine's shared memory segments, but for copies of training runs."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(node_memory.PREFIX)}


def engines(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those among the processes that are vLLM's, some of which may be ending just now."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name().startswith("VLLM::"):
                found.append(process)
    return found


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained two-layer Llama in an export directory with its manifest."""
    folder = tmp_path_factory.mktemp("export")
    write_export(folder)
    return folder


@pytest.fixture(scope="session")
def endpoint(
    exported: Path, s3_session: LocalS3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    """The trained model, served from S3 in fp32 by one prefill and one decode worker.

    Started once for all tests, the last of which end it.
    """
    folder = tmp_path_factory.mktemp("endpoint")
    uri = f"s3://{s3_session.bucket}/{folder.name}"
    _upload(exported, uri, s3_session)
    write_other(folder / "other", exported)
    _upload(folder / "other", f"{uri}-other", s3_session)
    job = {
        "name": "tide",
        "model": {"uri": uri, "name": MODEL_NAME, "max_model_len": MAX_MODEL_LEN},
        "http": {"port": free_run(1)},
        "dtype": "fp32",
        "mode": "split",
        # 80 sequences: what is kept for nobody is missed; room for two models at once
        "prefill": {"kv_cache_gb": 0.02, "cpus": 0.5},
        "decode": {"kv_cache_gb": 0.02, "cpus": 0.5},
        "engine": {"enable_prompt_tokens_details": True},
    }
    with served(job, exported, folder, **s3_session.environment) as found:
        found.other_uri = f"{uri}-other"
        yield found


@contextlib.contextmanager
def served(
    job: dict[str, Any], model: Path, folder: Path, **environment: str
) -> Iterator[Endpoint]:
    """``ebbtide serve`` with a job, until it has answered; ended if the test has not done that."""
    (folder / "serve.yaml").write_text(json.dumps(job))
    before, log = Endpoint.segments(), folder / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "ebbtide", "serve", str(folder / "serve.yaml")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment, "XDG_CACHE_HOME": str(folder)},
        )
    try:
        yield Endpoint(process, _first_line(process, log), log, model, before)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="session")
def client(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=endpoint.url, api_key="none", max_retries=0, timeout=120)


def _upload(exported: Path, uri: str, server: LocalS3) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        storage = open_storage(uri)
        for path in exported.iterdir():
            storage.put_file(path.name, path)


def _first_line(process: subprocess.Popen[str], log: Path) -> str:
    """The endpoint, which is the first line on standard output."""
    killer = threading.Timer(_START_LIMIT_S, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
    finally:
        killer.cancel()
    assert line.startswith("http://127.0.0.1:"), f"{line!r}\n{log.read_text()[-5000:]}"
    return line
