"""Where a model comes from, and what is said when it cannot be had."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ebbtide.platform.errors import ConfigError
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import ModelConfig
from ebbtide.train.loss import build_loss, cross_entropy
from ebbtide.train.model import build_model, check_model, config_json, resolve
from ebbtide.train.shard import blocks
from tests.train.conftest import Tiny


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_fresh_model_is_a_function_of_configuration_and_seed(tiny: Tiny) -> None:
    config = ModelConfig(source=tiny.model)
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    model = build_model(config, 300, 1)
    assert torch.equal(torch.rand(1), drawn)  # and leaves the generator alone
    assert same(model, build_model(config, 300, 1))
    assert not same(model, build_model(config, 300, 2))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(list(blocks(model))) == 2


def test_weights_from_a_folder_and_from_s3(tiny: Tiny, tmp_path: Path, s3_server: LocalS3) -> None:
    model = build_model(ModelConfig(source=tiny.model), 300, 3)
    model.save_pretrained(tmp_path)  # type: ignore[operator]  # a model of transformers
    loaded = build_model(ModelConfig(source=str(tmp_path), weights="pretrained"), 300, 4)
    assert same(model, loaded)
    assert loaded.training
    uri = f"s3://{s3_server.bucket}/core-model"
    for path in tmp_path.iterdir():
        open_storage(uri).put_file(path.name, path)
    remote = ModelConfig(source=uri, weights="pretrained")
    assert same(model, build_model(remote, 300, 4))
    check_model(remote, 300, 64)
    fresh = build_model(ModelConfig(source=str(tmp_path)), 300, 4)  # weights: random
    assert not same(model, fresh)


SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 300}
KINDS = ("llama", "gpt2", "gpt_neox", "qwen3", "opt", "mixtral", "gemma3_text", "phi")


@pytest.mark.parametrize("kind", KINDS)
def test_a_blank_model_lacks_nothing_but_the_values_of_its_parameters(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "config.json"
    more = {"intermediate_size": 64, "num_key_value_heads": 2, "word_embed_proj_dim": 32}
    path.write_text(json.dumps({"model_type": kind, **SMALL, **more}))
    source = ModelConfig(source=str(path))
    whole = build_model(source, 300, 1)
    for name, parameter in whole.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3 if name.endswith("weight") else 0.1)
    whole.save_pretrained(tmp_path)  # type: ignore[operator]
    pretrained = ModelConfig(source=str(tmp_path), weights="pretrained")
    whole = build_model(pretrained, 300, 1)
    for weight in tmp_path.glob("*.safetensors"):
        weight.unlink()  # no use of them, and none of the time to get them
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    blank = build_model(pretrained, 300, 1, blank=True)
    assert torch.equal(torch.rand(1), drawn)
    assert config_json(blank) == config_json(whole) and blank.training
    parameters, buffers = dict(blank.named_parameters()), dict(blank.named_buffers())
    assert list(parameters) == [name for name, _ in whole.named_parameters()]
    assert list(buffers) == [name for name, _ in whole.named_buffers()]
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameters[name].copy_(parameter)
        blank.eval(), whole.eval()
        tokens = torch.arange(20).view(2, 10)
        assert torch.equal(blank(tokens).logits, whole(tokens).logits)


def test_the_saved_configuration_is_ready_for_inference(tiny: Tiny) -> None:
    model = build_model(ModelConfig(source=tiny.model), 300, 3)
    assert model.config.use_cache is False  # type: ignore[union-attr]
    found = json.loads(str(config_json(model)))
    assert found["use_cache"] is True and found["hidden_size"] == 40
    assert config_json(nn.Linear(1, 1)) is None


def test_sources_that_cannot_be_used(tiny: Tiny, tmp_path: Path) -> None:
    def refused(match: str, **model: str) -> None:
        config = ModelConfig.model_validate(model)
        with pytest.raises(ConfigError, match=match):
            check_model(config, 300, 64)
        with pytest.raises(ConfigError, match=match):
            build_model(config, 300, 1)

    refused("config.json is not there", source=str(tmp_path))
    refused("config.json is not there", source=str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text(Path(tiny.model).read_text())
    refused("has no weights", source=str(tmp_path), weights="pretrained")
    (tmp_path / "broken.json").write_text("{")
    refused("not a model configuration", source=str(tmp_path / "broken.json"))
    (tmp_path / "strange.json").write_text('{"model_type": "no-such-thing"}')
    refused("not a model configuration", source=str(tmp_path / "strange.json"))


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"model_type": "llama", "vocab_size": "x"}', "'vocab_size' expected int, got str"),
        (
            '{"model_type": "llama", "hidden_size": 33, "num_attention_heads": 4}',
            "33. is not a multiple of the number of attention heads",
        ),
        ('{"model_type": "llama", "num_attention_heads": 0}', "ZeroDivisionError"),
        ('{"model_type": ["llama"]}', "not a model configuration"),
        ('{"model_type": "llama", "torch_dtype": "zork"}', "zork"),
        ('{"vocab_size": 300}', "model_type"),
        ("[1]", "not a JSON object"),
        ('{"model_type": ', "line 1 column"),
        ('{"model_type": "t5"}', "t5 is not a causal LM"),
        ('{"model_type": "bert"}', "bert is an encoder, not a causal LM"),
    ],
)
def test_a_wrong_configuration_is_said_of_the_path_that_was_given(
    tmp_path: Path, content: str, match: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    for run in (
        lambda: check_model(ModelConfig(source=str(path)), 300, 64),
        lambda: build_model(ModelConfig(source=str(path)), 300, 1),
    ):
        with pytest.raises(ConfigError, match=match) as caught:
            run()
        assert str(caught.value).startswith(f"{path}: ")
        assert "ebbtide-scratch-" not in str(caught.value)


def test_causal_models_are_let_through(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for kind in ("gpt_neox", "gpt2", "qwen3", "opt"):
        path.write_text(json.dumps({"model_type": kind}))
        check_model(ModelConfig(source=str(path)), 300, 64)
    path.write_text('{"model_type": "bert", "is_decoder": true}')
    check_model(ModelConfig(source=str(path)), 300, 64)


def test_weights_of_another_shape_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    model = build_model(ModelConfig(source=tiny.model), 300, 3)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(
        ConfigError, match="tensors are missing or of another shape, model.layers.2"
    ):
        build_model(ModelConfig(source=str(tmp_path), weights="pretrained"), 300, 1)


def test_what_the_model_is_too_small_for(tiny: Tiny) -> None:
    config = ModelConfig(source=tiny.model)
    for build in (lambda: build_model(config, 302, 1), lambda: check_model(config, 302, 64)):
        with pytest.raises(ConfigError, match="vocabulary has 302 tokens, the model's only 301"):
            build()
    with pytest.raises(ConfigError, match=r"sequence_length is 65.*positions for 64 tokens"):
        check_model(config, 300, 65)


def test_a_function_of_the_working_directory(here: Path) -> None:
    (here / "mine_of_model_test.py").write_text(
        "import torch\n"
        "def net(vocab_size): return torch.nn.Embedding(vocab_size, 4)\n"
        "def text(vocab_size): return 'no model'\n"
        "def other(size): pass\n"
        "def zero(output, labels): return output.sum() * 0\n"
        "value = 1\n"
    )
    model = build_model(ModelConfig(factory="mine_of_model_test:net"), 30, 1)
    assert isinstance(model, nn.Embedding) and model.num_embeddings == 30
    loss = build_loss(ModelConfig(source="x", loss="mine_of_model_test:zero"))
    assert float(loss(torch.ones(2), torch.ones(2))) == 0
    for name, match in (
        ("text", "returned str, not a torch.nn.Module"),
        ("other", "must take vocab_size"),
        ("value", "has no function 'value'"),
        ("missing", "has no function 'missing'"),
    ):
        with pytest.raises(ConfigError, match=match):
            build_model(ModelConfig(factory=f"mine_of_model_test:{name}"), 30, 1)
        if name != "text":  # which only a call can tell
            with pytest.raises(ConfigError, match=match):
                check_model(ModelConfig(factory=f"mine_of_model_test:{name}"), 30, 64)
    with pytest.raises(ConfigError, match="os:system must take vocab_size"):
        check_model(ModelConfig(factory="os:system"), 30, 64)
    check_model(ModelConfig(factory="builtins:dict"), 30, 64)  # has no signature to look at


def test_a_module_that_cannot_be_imported(here: Path) -> None:
    (here / "broken_of_model_test.py").write_text("raise RuntimeError('on purpose')\n")
    with pytest.raises(ConfigError, match="RuntimeError: on purpose"):
        resolve("broken_of_model_test:f")
    with pytest.raises(ConfigError, match="No module named"):
        resolve("no_such_module_anywhere:f")


def test_cross_entropy_sums_over_what_counts() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    labels = torch.tensor([[1, -100, 2], [-100, -100, 4]])
    expected = -sum(
        torch.log_softmax(logits[i, j].float(), -1)[labels[i, j]]
        for i, j in ((0, 0), (0, 2), (1, 2))
    )
    assert torch.allclose(cross_entropy(logits, labels), torch.as_tensor(expected))
    assert float(cross_entropy(logits, torch.full((2, 3), -100))) == 0
