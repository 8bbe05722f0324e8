"""An endpoint with a draft model, a ledger and a collector of traces: one ``ebbtide serve``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from itertools import cycle
from pathlib import Path

import openai
import pytest

from ebbtide.platform.ports import free_run
from ebbtide.serve.fleet import IDLE_BEAT_S
from tests.serve.conftest import MODEL_NAME, served
from tests.serve.served import measured, stream, token_ids, until, workers
from tests.serve.test_endpoint import prompts, reference
from tests.serve.test_endpoint_workers import _NUM_STREAMS, _OPTIONS, _TEXTS, followed
from tests.serve.test_traces import PARENT, TRACE, TRACEPARENT, Collector, attributes
from tests.serve.tiny_model import MAX_MODEL_LEN

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

_NEW_TOKENS, _TIE = 64, 1e-3
_PREFILL_S = 'ebbtide_replica_seconds{role="prefill"}'


def test_speculation_over_two_roles_changes_no_token_and_all_is_in_the_books(
    exported: Path, tmp_path: Path
) -> None:
    collector = Collector()
    threading.Thread(target=collector.serve_forever, args=(0.1,), daemon=True).start()
    role = {"kv_cache_gb": 0.05, "usd_per_hour": 3.6}
    job = {
        "name": "tide",
        "model": {"uri": str(exported), "name": MODEL_NAME, "max_model_len": MAX_MODEL_LEN},
        "http": {"port": free_run(1)},
        "dtype": "fp32",
        "mode": "split",
        "prefill": role,
        "decode": role,
        "speculation": {"draft": str(exported), "tokens": 3},
        "ledger": str(tmp_path / "ledger"),
        "traces": collector.url,
    }
    with served(job, exported, tmp_path) as endpoint:
        client = openai.OpenAI(base_url=endpoint.url, api_key="none", max_retries=0, timeout=120)
        texts = prompts()[:10]
        expected = reference(exported, texts)
        found = [token_ids(client, text, max_tokens=_NEW_TOKENS) for text in texts]
        clear = [lead > _TIE for _, lead in expected]
        assert sum(clear) >= 6
        for text, ids, (others, _), is_clear in zip(texts, found, expected, clear, strict=True):
            assert not is_clear or ids == others, text
        assert measured(endpoint)['ebbtide_prefills_total{where="remote"}'] >= len(texts)
        options = {"extra_headers": {"traceparent": TRACEPARENT}}
        stream(client, "\n", max_tokens=_NEW_TOKENS, **options)
        expected_texts = [stream(client, text, **_OPTIONS)[0] for text in _TEXTS]
        moved = measured(endpoint)["ebbtide_moved_streams_total"]
        others_too = followed(client, workers(endpoint, "decode")[-1])
        for (whole, _, _, error), expected_text in zip(others_too, cycle(expected_texts)):
            assert error is None and whole == expected_text
        assert measured(endpoint)["ebbtide_moved_streams_total"] > moved
        lived_s = measured(endpoint)[_PREFILL_S]
        rest_s = 3 * IDLE_BEAT_S  # one span between beats, at least, is without a request
        until(lambda: measured(endpoint)[_PREFILL_S] > lived_s + rest_s, 60, "it does not rest")
        endpoint.process.send_signal(signal.SIGINT)
        assert endpoint.process.wait(90) == 130, endpoint.log.read_text()[-3000:]
    num_tokens = _NEW_TOKENS * (len(texts) + 1) + 200 * (len(_TEXTS) + _NUM_STREAMS)
    num_requests = len(texts) + 1 + len(_TEXTS) + _NUM_STREAMS
    _check_books(tmp_path / "ledger", num_requests, num_tokens)
    requests = [span for span in collector.spans if span.name.startswith("POST")]
    assert len(requests) == num_requests
    (of_client,) = (span for span in requests if span.trace_id.hex() == TRACE)
    assert of_client.parent_span_id.hex() == PARENT
    assert attributes(of_client)["gen_ai.usage.output_tokens"] == _NEW_TOKENS
    stages = [s.name for s in collector.spans if s.parent_span_id == of_client.span_id]
    assert stages[:3] == ["queue", "prefill", "transfer"] and "decode" in stages
    collector.shutdown()
    collector.server_close()


def _check_books(ledger: Path, num_requests: int, num_tokens: int) -> None:
    command = [sys.executable, "-m", "ebbtide", "cost", str(ledger), "--json"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    books = json.loads(told)
    assert books["status"] == "stopped"
    (key,) = books["keys"]
    assert (key["key"], key["requests"]) == ("anyone", num_requests)
    assert key["output_tokens"] == num_tokens
    assert key["prefill_s"] > 0 and key["transfer_s"] > 0 and key["decode_s"] > 0
    assert books["cost_usd"] == pytest.approx(books["node_seconds"] / 1000, rel=1e-3)
    tokens = key["prompt_tokens"] + key["output_tokens"]
    expected = books["node_seconds"] / 1000 * 1e6 / tokens
    assert books["usd_per_million_tokens"] == pytest.approx(expected, rel=0.01)
    assert {node["instance_type"] for node in books["nodes"]} == {"prefill", "decode"}
    assert 0 < books["owners"]["compute"]["node_seconds"] < books["node_seconds"]
