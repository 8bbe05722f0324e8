"""Weights in fewer bits: a copy of a model directory that vLLM loads as it is.

Rounding to the nearest value, without any data: every output channel (``int8``, ``fp8``) or every
group of weights of a channel (``w4``) has a scale of its own. Of ``int8`` and ``fp8`` the engine
rounds activations too, token by token, as they come. Embeddings, norms and the output layer stay as
they are. The format is that of compressed-tensors, which vLLM has kernels for on CPUs and GPUs.

Promises: a copy is made once per machine, is whole or not there, and has a manifest of its own that
is checked whenever it is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbtide.platform import export_manifest
from ebbtide.platform.checksums import sha256
from ebbtide.platform.errors import ServeError
from ebbtide.platform.export_manifest import MANIFEST, ExportManifest
from ebbtide.platform.storage import LocalStorage
from ebbtide.serve.config import Scheme
from ebbtide.serve.model_cache import locked, make_room

if TYPE_CHECKING:
    import torch

_PRESETS: dict[Scheme, str] = {"int8": "INT8", "w4": "W4A16", "fp8": "FP8_DYNAMIC"}
_FORMATS: dict[Scheme, str] = {
    "int8": "int-quantized",
    "w4": "pack-quantized",
    "fp8": "float-quantized",
}
_GROUP_SIZES = (128, 64, 32)
_WEIGHTS = ".safetensors"
_INDEX = "model.safetensors.index.json"
_KEPT_AS_IT_IS = "lm_head"
_VERSION = 1
"""Of what is written; a change makes new copies."""


def check_quantizable(folder: Path, scheme: Scheme) -> None:
    """Raise ServeError for a model directory that no copy can be made of."""
    described = json.loads((folder / "config.json").read_bytes())
    text = described.get("text_config", described)
    instead = "quantize it with llm-compressor, and serve that without `quantization`"
    if found := described.get("quantization_config"):
        name = found.get("quant_method", "some method")
        raise ServeError(
            f"{folder}: is quantized already ({name}); leave `quantization` out, vLLM sees it"
        )
    if any(text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ServeError(f"{folder}: experts cannot be quantized here; {instead}")
    if not any(path.suffix == _WEIGHTS for path in folder.iterdir()):
        raise ServeError(f"{folder}: only weights in *{_WEIGHTS} can be quantized; {instead}")
    shapes = _linear_shapes(folder)
    if not shapes:
        raise ServeError(f"{folder}: has no linear layers that could be quantized")
    if scheme == "w4":
        _group_size(folder, shapes)


def quantized(folder: Path, scheme: Scheme, cache: Path) -> Path:
    """The copy of a verified directory under ``cache``, made if it is not there, or damaged.

    Raises ServeError as :func:`check_quantizable` does, for weights that cannot be read or are not
    finite, and for a cache that cannot be written.
    """
    from safetensors import SafetensorError

    try:
        return _copy(folder, scheme, cache)
    except OSError as error:
        raise ServeError(
            f"{cache}: no quantized copy of {folder} could be made there: {error}; free space, or "
            "set XDG_CACHE_HOME"
        ) from error
    except SafetensorError as error:
        raise ServeError(
            f"{folder}: its weights cannot be read: {error}; export it anew"
        ) from error


def _copy(folder: Path, scheme: Scheme, cache: Path) -> Path:
    copy = cache / f"{_identity(folder, scheme)}-{scheme}"
    with locked(copy):
        manifest = export_manifest.read(LocalStorage(copy))
        if manifest is not None and export_manifest.damage(copy, manifest) is None:
            return copy
        check_quantizable(folder, scheme)
        shutil.rmtree(copy, ignore_errors=True)
        make_room(cache, sum(path.stat().st_size for path in folder.iterdir()))
        copy.mkdir()
        _write(folder, scheme, copy)
    return copy


def _identity(folder: Path, scheme: Scheme) -> str:
    manifest = folder / MANIFEST
    if manifest.is_file():
        source = manifest.read_bytes()
    else:
        stats = [(path, path.stat()) for path in sorted(folder.iterdir())]
        source = json.dumps([(str(p), s.st_size, s.st_mtime_ns) for p, s in stats]).encode()
    return sha256(f"{_VERSION} {scheme} ".encode() + source)[:32]


def _linear_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """The names of linear layers, but the output layer, with (outputs, inputs)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            described = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ServeError(f"{folder}: transformers does not know the model: {error}") from error
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != _KEPT_AS_IT_IS
    }


def _group_size(folder: Path, shapes: dict[str, tuple[int, int]]) -> int:
    inputs = {num_inputs for _, num_inputs in shapes.values()}
    for size in _GROUP_SIZES:
        if all(each % size == 0 for each in inputs):
            return size
    raise ServeError(
        f"{folder}: w4 needs layers with a multiple of {_GROUP_SIZES[-1]} inputs, and these have "
        f"{', '.join(map(str, sorted(inputs)))}; take int8"
    )


def _write(folder: Path, scheme: Scheme, copy: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    shapes = _linear_shapes(folder)
    how = preset_name_to_scheme(_PRESETS[scheme], ["Linear"])
    if scheme == "w4":
        how.weights.group_size = _group_size(folder, shapes)
    placed = dict(_write_weights(folder, how, _FORMATS[scheme], shapes, copy))
    if missing := sorted(f"{name}.weight" for name in shapes.keys() - placed.keys()):
        raise ServeError(f"{folder}: holds no {missing[0]}; its weights have other names")
    for path in folder.iterdir():
        if path.suffix != _WEIGHTS and path.name not in (_INDEX, MANIFEST) and path.is_file():
            shutil.copyfile(path, copy / path.name)
    described = json.loads((folder / "config.json").read_bytes())
    described["quantization_config"] = QuantizationConfig(
        config_groups={"group_0": how},
        format=_FORMATS[scheme],
        ignore=[_KEPT_AS_IT_IS],
        quantization_status="compressed",
    ).model_dump(mode="json")
    (copy / "config.json").write_text(json.dumps(described, indent=2))
    _finish(folder, copy)


def _write_weights(
    folder: Path, how: Any, form: str, shapes: dict[str, tuple[int, int]], copy: Path
) -> Iterator[tuple[str, str]]:
    """One file after the other, each in memory at once. Yields what was quantized, and where."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    index: dict[str, str] = {}
    for path in sorted(folder.glob(f"*{_WEIGHTS}")):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(path, framework="pt") as source:
            for key in source.keys():  # noqa: SIM118  # it is no dictionary
                name = key.removesuffix(".weight")
                if name == key or name not in shapes:
                    tensors[key] = source.get_tensor(key)
                    continue
                weight = source.get_tensor(key).float()
                if not bool(weight.isfinite().all()):
                    raise ServeError(f"{path}: {key} has values that are not finite")
                found = _compressed(weight, how, form)
                tensors |= {f"{name}.{part}": value for part, value in found.items()}
                yield name, path.name
        save_file(tensors, copy / path.name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, path.name)
    if len(set(index.values())) > 1:
        (copy / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _compressed(weight: torch.Tensor, how: Any, form: str) -> dict[str, torch.Tensor]:
    """The parts that a layer's weights (outputs, inputs) are stored in."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    size = how.weights.group_size
    grouped = weight.reshape(len(weight), -1, size or weight.shape[-1])
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), how.weights)
    parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    return {key: part.contiguous() for key, part in compressor.compress(parts, how).items()}


def _finish(folder: Path, copy: Path) -> None:
    """The manifest, last; where the source has none, one that says so."""
    source = export_manifest.read(LocalStorage(folder))
    names = [path.name for path in copy.iterdir()]
    whole = ExportManifest(
        run=source.run if source else "unknown",
        step=source.step if source else 0,
        dataset_sha256=source.dataset_sha256 if source else "0" * 64,
        dtype=source.dtype if source else "bf16",
        parameters=source.parameters if source else 0,
        files=export_manifest.describe(copy, names),
    )
    (copy / MANIFEST).write_bytes(export_manifest.to_bytes(whole))
