"""``ebbtide serve check`` with vLLM's engine: what it measures is right."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ebbtide.train.dataset import TokenDataset
from tests.serve.tiny_model import MAX_MODEL_LEN, corpus, one_thread

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

_SEQUENCES = 8
_ROUNDING = 2**-8
"""Of a number in bf16. Where it happens depends on the processor's instructions."""


def ebbtide(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ebbtide", *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def perplexity(model: Path, dataset: str) -> float:
    """As transformers has it in bf16, in which a model is served that may be quantized."""
    data = TokenDataset(dataset, "validation", MAX_MODEL_LEN - 1)
    ids = torch.tensor([data.sequence(i)[0].tolist() for i in range(_SEQUENCES)])
    with torch.no_grad(), one_thread():
        served = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        loss = served(input_ids=ids, labels=ids).loss
    return math.exp(loss.item())


def test_quantized_weights_on_a_validation_shard(exported: Path, tmp_path: Path) -> None:
    documents = [json.dumps({"text": line}) for line in corpus(seed=1).split("\n")]
    (tmp_path / "text.jsonl").write_text("\n".join(documents[:1200]))
    dataset, text = str(tmp_path / "dataset"), str(tmp_path / "text.jsonl")
    how = ["--tokenizer", str(exported), "--validation-fraction", "0.1"]
    ebbtide(tmp_path, "data", "prepare", text, "--out", dataset, *how)
    job = tmp_path / "serve.yaml"
    job.write_text(
        f"name: tide\nmodel: {{uri: {exported}, max_model_len: {MAX_MODEL_LEN}}}\n"
        "decode: {kv_cache_gb: 0.05}\nquantization: int8\n"
    )
    asked = ["--data", dataset, "--sequences", str(_SEQUENCES), "--json"]
    found = json.loads(ebbtide(tmp_path, "serve", "check", str(job), *asked))
    assert found["fault"] is None
    assert found["tokens"] == _SEQUENCES * (MAX_MODEL_LEN - 2)
    theirs = perplexity(exported, dataset)
    assert found["plain"]["perplexity"] == pytest.approx(theirs, rel=_ROUNDING)
    quantized = found["quantized"]
    assert 1e-7 < abs(quantized["perplexity_increase"]) < 0.02, "the same, or not the same model"
    assert sum(quantized["answers"].values()) == _SEQUENCES
    assert min(quantized["tokens_per_s"], quantized["batch_tokens_per_s"]) > 0
