"""A quantized copy has the model's weights to within its steps, and is made once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ebbtide.platform.errors import ServeError
from ebbtide.serve.config import Scheme
from ebbtide.serve.model_files import fetch
from ebbtide.serve.quantize import check_quantizable, quantized

SCHEMES: tuple[Scheme, ...] = get_args(Scheme)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, tied embeddings, in two files."""
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=1,
                num_attention_heads=2,
                tie_word_embeddings=True,
            )
        ).save_pretrained(folder, max_shard_size="100KB")
    (folder / "tokenizer.json").write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def dequantized(parts: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights that an engine computes with, and the size of a step of each."""
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32

    scale = parts[f"{name}.weight_scale"]
    if f"{name}.weight_packed" in parts:
        shape = torch.Size(parts[f"{name}.weight_shape"].tolist())
        whole = unpack_from_int32(parts[f"{name}.weight_packed"], 4, shape).float()
    else:
        whole = parts[f"{name}.weight"].float()
    steps = scale.repeat_interleave(whole.shape[1] // scale.shape[1], 1)
    return whole * steps, steps


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_right_to_within_a_step(model: Path, tmp_path: Path, scheme: Scheme) -> None:
    copy = quantized(model, scheme, tmp_path)
    before, after = tensors(model), tensors(copy)
    linear = {key.removesuffix(".weight") for key in before if "proj" in key}
    assert len(linear) == 7
    for name in linear:
        found, step = dequantized(after, name)
        exact = before[f"{name}.weight"]
        # fp8 has 3 bits after the leading one; the others have equal steps, and the largest
        # value of the symmetric range may be half a step beyond the last
        allowed = exact.abs() / 16 + step / 512 if scheme == "fp8" else step * 0.501
        assert ((found - exact).abs() <= allowed + 1e-7).all(), name
    for key in before.keys() - {f"{name}.weight" for name in linear}:
        assert torch.equal(before[key], after[key]), key
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == after.keys()
    assert all((copy / name).is_file() for name in index.values())
    said = json.loads((copy / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors" and said["ignore"] == ["lm_head"]
    assert fetch(str(copy)) == copy


def test_a_copy_is_made_once_and_again_when_it_is_damaged(model: Path, tmp_path: Path) -> None:
    copy = quantized(model, "int8", tmp_path)
    made_ns = (copy / "config.json").stat().st_mtime_ns
    assert quantized(model, "int8", tmp_path) == copy
    assert (copy / "config.json").stat().st_mtime_ns == made_ns
    weights = next(copy.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert quantized(model, "int8", tmp_path) == copy
    assert weights.read_bytes() == whole
    (copy / "ebbtide.json").unlink()  # as after a crash
    weights.unlink()
    assert quantized(model, "int8", tmp_path) == copy and weights.read_bytes() == whole
    assert quantized(model, "w4", tmp_path) != copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized already \(awq\)"),
        ({"num_local_experts": 8}, "experts cannot be quantized here"),
        ({"intermediate_size": 144}, "w4 needs layers with a multiple of 32 inputs.*144"),
        ({"model_type": "nobody"}, "transformers does not know"),
    ],
)
def test_refused(model: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | change))
    with pytest.raises(ServeError, match=message):
        check_quantizable(folder, "w4")


def test_weights_in_another_format_are_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ServeError, match="only weights in"):
        check_quantizable(folder, "int8")


def test_what_no_copy_can_be_made_of_is_told(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    first = sorted(broken.glob("*.safetensors"))[0]
    bad = {key: torch.full_like(value, torch.nan) for key, value in load_file(first).items()}
    save_file(bad, first, metadata={"format": "pt"})
    cache = tmp_path / "cache"
    with pytest.raises(ServeError, match="not finite"):
        quantized(broken, "int8", cache)
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(ServeError, match="cannot be read"):
        quantized(broken, "int8", cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(ServeError, match="no quantized copy of .* could be made there"):
        quantized(model, "int8", tmp_path / "file")
