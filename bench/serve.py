"""What clients see of a small model: bare vLLM, Ray Serve's own prefill/decode, and ebbtide.

``python -m bench.serve [--short] [--json] [--only NAME ...]``: all share this machine's cores, one
after the other. The last line is one JSON document. Differences are in ms, the rest are ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.serve_client import measure
from bench.serve_model import write_model
from ebbtide.platform.ports import free_run
from ebbtide.platform.process_session import descendants

MODEL = "bench"
MAX_MODEL_LEN = 1024
CONTENDERS = ("bare", "stock", "ours")
ROUNDS = {1: 40, 8: 12, 32: 4}
SHORT_ROUNDS = {1: 12, 8: 4, 32: 1}
_START_S = 400.0
_OWN_PROCESSES = ("ray::RouterProcess", "ray::ServeReplica", "VLLM::")
_ENGINE = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextlib.contextmanager
def _server(command: list[str], port: int, **variables: str) -> Iterator[str]:
    """A server in a process of its own, once it answers."""
    url = f"http://127.0.0.1:{port}/v1"
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as sockets:
        environment = {**os.environ, **_ENGINE, "VLLM_RPC_BASE_PATH": sockets, **variables}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            deadline_s = time.monotonic() + _START_S
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/models", timeout=5).close()
                    break
                if process.poll() is not None or time.monotonic() > deadline_s:
                    log.seek(0)
                    text = log.read().decode(errors="replace")
                    raise RuntimeError(f"{command[2]} does not answer:\n{text[-3000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def bare(model: Path, rounds: dict[int, int]) -> dict[str, Any]:
    """vLLM's own server: one engine that does everything."""
    port = free_run(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    options = ["--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1"]
    options += ["--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager", "--dtype", "float32"]
    options += ["--kv-cache-memory-bytes", str(2**28), "--disable-uvicorn-access-log"]
    with _server([*command, *options], port) as url:
        return {"": measure(url, MODEL, rounds)}


def stock(model: Path, rounds: dict[int, int]) -> dict[str, Any]:
    """``ray.serve.llm.build_pd_openai_app`` as it comes."""
    port = free_run(1)
    command = [sys.executable, "-m", "bench.serve_stock", str(model), str(port)]
    with _server(command, port) as url:
        return {"": measure(url, MODEL, rounds)}


def ours(model: Path, rounds: dict[int, int]) -> dict[str, Any]:
    """One endpoint, led in each of the ways in turn; and what it uses while nothing is asked."""
    import ray

    from ebbtide.platform.config import parse
    from ebbtide.serve import job
    from ebbtide.serve.beats import NAMESPACE
    from ebbtide.serve.config import ServeConfig
    from ebbtide.serve.router_actor import router_names

    engine = f"max_model_len: {MAX_MODEL_LEN}, name: {MODEL}"
    config = parse(
        f"""{{name: bench, model: {{uri: {model}, {engine}}}, http: {{port: {free_run(1)}}},
        dtype: fp32, prefill: {{kv_cache_gb: 0.25}}, decode: {{kv_cache_gb: 0.25}}}}""",
        ServeConfig,
    )
    found: dict[str, Any] = {}
    with job.start(config) as serving:
        router = ray.get_actor(router_names(config)[0], NAMESPACE)
        for prefix, mode in (("", "auto"), ("split_", "split"), ("colocated_", "colocated")):
            ray.get(router.set_mode.remote(mode))
            print(f"mode: {mode}", file=sys.stderr, flush=True)
            found[prefix] = measure(serving.endpoint, MODEL, rounds)
        found |= idle()
    return found


def idle(seconds: float = 20.0) -> dict[str, float]:
    """What all processes below this one use of a core while nothing is asked, and the part of
    routers, replicas and engines; the rest is Ray's own: its daemons, agents and controller."""
    import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

    def used_s() -> dict[psutil.Process, float]:
        found = {}
        for pid in descendants(os.getpid()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found[process] = sum(process.cpu_times()[:2])
        return found

    time.sleep(3.0)
    before_s, began_s = used_s(), time.monotonic()
    time.sleep(seconds)
    took_s, total_s, own_s = time.monotonic() - began_s, 0.0, 0.0
    for process, now_s in used_s().items():
        with contextlib.suppress(psutil.NoSuchProcess):
            used = now_s - before_s.get(process, now_s)
            total_s += used
            own_s += used if " ".join(process.cmdline()).startswith(_OWN_PROCESSES) else 0.0
    percent = {"": total_s, "application_": own_s}
    return {f"idle_{k}cpu_percent": round(v / took_s * 100, 1) for k, v in percent.items()}


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """The figures by their keys, and ours against the others'."""
    result: dict[str, Any] = {}
    for name, parts in found.items():
        for prefix, by_clients in parts.items():
            if prefix.startswith("idle_"):
                result[prefix] = by_clients
                continue
            for clients, figures in by_clients.items():
                for key, value in figures.items():
                    result[f"{name}_{prefix}{key}_{clients}"] = value
    for prefix in ("", "split_"):
        mine, theirs = f"ours_{prefix}", "bare_"
        if f"{mine}ttft_p50_ms_1" not in result:
            continue
        if f"{theirs}ttft_p50_ms_1" in result:
            difference = result[f"{mine}ttft_p50_ms_1"] - result[f"{theirs}ttft_p50_ms_1"]
            result[f"{prefix}vs_bare_ttft_p50_ms_1"] = round(difference, 2)
            for key in ("itl_p50_ms_1", "itl_p90_ms_1", "tokens_per_s_8"):
                ratio = result[mine + key] / result[theirs + key]
                result[f"{prefix}vs_bare_{key.replace('_ms', '')}"] = round(ratio, 3)
        if "stock_ttft_p50_ms_1" in result:
            for key in ("ttft_p50_ms_1", "tokens_per_s_8"):
                ratio = result[mine + key] / result["stock_" + key]
                result[f"{prefix}vs_stock_{key.replace('_ms', '')}"] = round(ratio, 3)
    return result


def main() -> None:
    """Run the contenders and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments = parser.parse_args()
    rounds = SHORT_ROUNDS if arguments.short else ROUNDS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        for name in arguments.only:
            contender = {"bare": bare, "stock": stock, "ours": ours}[name]
            found[name] = contender(Path(folder), rounds)
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    result = compared(found)
    if not arguments.json:
        for key, value in result.items():
            print(f"{key:40} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
