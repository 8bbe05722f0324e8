"""A model directory, made local and checked before an engine reads it.

Promises: what an engine loads has the bytes that the export's manifest names; a directory that
cannot be served is refused with what is wrong in it. A local directory is used where it lies; one
on S3 is copied once per machine.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from ebbtide.platform import export_manifest
from ebbtide.platform.checksums import sha256
from ebbtide.platform.errors import ServeError, StorageError
from ebbtide.platform.export_manifest import MANIFEST
from ebbtide.platform.storage import LocalStorage, Storage, open_storage
from ebbtide.serve.config import ServeConfig
from ebbtide.serve.model_cache import cache_root, locked, make_room

log = logging.getLogger(__name__)

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The attention head sizes that vLLM has CPU kernels for; others fail at the first request."""

_WEIGHTS = (".safetensors", ".bin", ".gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def fetch(uri: str, cache: Path | None = None) -> Path:
    """The directory as a local path, every file checked against the export's manifest.

    Raises ServeError that names the first damaged file, or says that nothing is there. A directory
    without a manifest (not made by ``ebbtide export``) is taken as it is, with a warning.
    """
    storage = open_storage(uri)
    try:
        whole = export_manifest.read(storage)
    except StorageError as error:
        raise ServeError(str(error)) from error
    if isinstance(storage, LocalStorage):
        folder = Path(storage.uri)
        if not folder.is_dir():
            raise ServeError(f"{uri}: no such directory; give what `ebbtide export --out` wrote")
    else:
        folder = _copy(storage, whole, cache or cache_root())
    if whole is None:
        log.warning("%s has no %s, so its files cannot be verified", uri, MANIFEST)
        return folder
    problem = export_manifest.damage(folder, whole)
    if problem and not isinstance(storage, LocalStorage):  # it may be only the copy that is bad
        shutil.rmtree(folder)
        problem = export_manifest.damage(_copy(storage, whole, folder.parent), whole)
    if problem:
        raise ServeError(f"{uri}: {problem}; restore the file, or export the model again")
    return folder


def _copy(storage: Storage, whole: export_manifest.ExportManifest | None, cache: Path) -> Path:
    """A copy named by what it holds; files that are there in the right size are kept."""
    if whole is not None:
        sizes = {file.key: file.size_bytes for file in whole.files}
        identity = export_manifest.to_bytes(whole)
    else:
        found = storage.list()
        if not found:
            raise ServeError(f"{storage.uri}: holds nothing; give what `ebbtide export` wrote")
        sizes = {info.key: info.size_bytes for info in found}
        identity = json.dumps(
            [(storage.uri, i.key, i.size_bytes, i.modified_s) for i in found]
        ).encode()
    folder = cache / sha256(identity)[:32]
    try:
        with locked(folder):
            folder.mkdir(exist_ok=True)
            missing = {key: n for key, n in sizes.items() if not _is_there(folder / key, n)}
            if missing:
                make_room(cache, sum(missing.values()))
            for key in missing:
                storage.get_file(key, folder / key)
    except OSError as error:
        raise ServeError(
            f"{cache}: no copy of {storage.uri} could be made there: {error}; free space, or set "
            "XDG_CACHE_HOME"
        ) from error
    return folder


def _is_there(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


def check_servable(folder: Path, config: ServeConfig) -> None:
    """Raise ServeError for what an engine would stumble over, before one is started."""
    described = _read_config(folder)
    names = sorted(path.name for path in folder.iterdir())
    if not any(name.endswith(_WEIGHTS) for name in names):
        raise ServeError(
            f"{folder}: holds no weights (*.safetensors); export a checkpoint, or copy them there"
        )
    if not set(_TOKENIZERS) & set(names):
        raise ServeError(f"{folder}: holds no tokenizer (tokenizer.json); copy it there")
    text = described.get("text_config", described)
    limit, wanted = text.get("max_position_embeddings"), config.model.max_model_len
    if isinstance(limit, int) and wanted is not None and wanted > limit:
        raise ServeError(
            f"model.max_model_len is {wanted}, but {folder} has positions for {limit} tokens only"
        )
    head_size = _head_size(text)
    if config.accelerator == "cpu" and head_size and head_size not in CPU_HEAD_SIZES:
        raise ServeError(
            f"{folder}: attention heads of size {head_size} cannot be served on CPUs; vLLM has "
            f"kernels for {', '.join(map(str, CPU_HEAD_SIZES))}"
        )


def described(folder: Path) -> dict[str, Any]:
    """The configuration of a model directory's language model. Raises ServeError."""
    whole = _read_config(folder)
    return dict(whole.get("text_config", whole))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        described = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ServeError(f"{folder}: holds no config.json; it is not a model directory") from error
    except ValueError as error:
        raise ServeError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(described, dict) or "model_type" not in described:
        raise ServeError(f"{path}: names no model_type; it is not a model of transformers")
    return described


def _head_size(config: dict[str, Any]) -> int | None:
    """None where the configuration does not say, or has no such thing as one head size."""
    if config.get("head_dim"):
        return int(config["head_dim"])
    width = config.get("hidden_size", config.get("n_embd"))
    heads = config.get("num_attention_heads", config.get("n_head"))
    return width // heads if width and heads else None
