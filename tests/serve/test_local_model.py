"""What an engine would stumble over is said of the model, its draft and its quantization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.platform.config import parse
from ebbtide.platform.errors import ServeError
from ebbtide.serve import local_model
from ebbtide.serve.config import ServeConfig

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}


def write(folder: Path, words: str = "abc", **described: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_LLAMA | described))
    (folder / "model.safetensors").write_bytes(b"")
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return folder


def config(model: Path, text: str = "") -> ServeConfig:
    return parse(f"{{name: tide, model: {{uri: {model}}}, {text}}}", ServeConfig)


def test_a_draft_must_have_the_models_tokens(tmp_path: Path) -> None:
    model = write(tmp_path / "model")

    def check(draft: Path) -> None:
        local_model.check(config(model, f"speculation: {{draft: {draft}}}"))

    check(write(tmp_path / "same", hidden_size=128))
    with pytest.raises(ServeError, match="vocabulary of 65 tokens, but the model has 64"):
        check(write(tmp_path / "more", vocab_size=65))
    with pytest.raises(ServeError, match="its tokenizer has other tokens than the model's"):
        check(write(tmp_path / "other", words="abd"))
    with pytest.raises(ServeError, match="no such directory"):
        check(tmp_path / "nowhere")
    with pytest.raises(ServeError, match="heads of size 24"):
        check(write(tmp_path / "heads", head_dim=24))


def test_the_model_must_be_quantizable(tmp_path: Path) -> None:
    model = write(tmp_path / "model", quantization_config={"quant_method": "gptq"})
    local_model.check(config(model))
    with pytest.raises(ServeError, match=r"quantized already \(gptq\)"):
        local_model.check(config(model, "quantization: int8"))


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "speculation: {draft: draft}, ledger: books"
    found = local_model.absolute(config(Path("model"), text))
    assert found.model.uri == str(tmp_path / "model")
    assert found.speculation is not None and found.speculation.draft == str(tmp_path / "draft")
    assert found.ledger == str(tmp_path / "books")
    remote = config(Path("model"), "ledger: s3://bucket/books")
    assert local_model.absolute(remote).ledger == "s3://bucket/books"
    assert local_model.absolute(remote).speculation is None


def test_the_length_is_that_of_the_job_or_of_the_model(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    assert local_model.max_model_len(config(model)) == 256
    short = parse(f"{{name: t, model: {{uri: {model}, max_model_len: 9}}}}", ServeConfig)
    assert local_model.max_model_len(short) == 9
    assert local_model.vocab_size(short) == 64
    without = write(tmp_path / "without", max_position_embeddings=None)
    with pytest.raises(ServeError, match=r"set model\.max_model_len"):
        local_model.max_model_len(config(without))
