"""From a checkpoint to a directory that transformers and vLLM load: weights, tokenizer, manifest.

Promises: the directory's logits are the trainer's; the same checkpoint gives the same bytes; the
manifest is written last; what already lies at the output is never overwritten: it is the same
export, whole or half written, or the export is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ebbtide.platform import export_manifest
from ebbtide.platform.checksums import sha256_of_stored
from ebbtide.platform.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigError,
    DataError,
)
from ebbtide.platform.export_manifest import (
    MANIFEST,
    Dtype,
    ExportedFile,
    ExportManifest,
)
from ebbtide.platform.scratch import scratch_folder
from ebbtide.platform.storage import Storage, open_storage
from ebbtide.train import checkpoint
from ebbtide.train.config import TrainConfig
from ebbtide.train.dataset import index_digest, read_tokenizer_files
from ebbtide.train.manifest import CheckpointManifest
from ebbtide.train.stored import from_newest

log = logging.getLogger(__name__)


def export(checkpoint_uri: str, out_uri: str, dtype: Dtype = "fp32") -> ExportManifest:
    """Write a Hugging Face directory; a run's URI means its newest checkpoint.

    Raises CheckpointError for a checkpoint that is missing, damaged or not of a transformers model,
    DataError if the run's dataset is not the one it was trained on, AlreadyExists if ``out_uri``
    holds anything but this export.
    """
    out = open_storage(out_uri)
    with scratch_folder("export") as folder:
        described, job, model = from_newest(checkpoint_uri, _read)
        _write_tokenizer(job, described, folder)
        _set_special_tokens(model, folder)
        _save(model, folder, dtype)
        whole = ExportManifest(
            run=described.run,
            step=described.step,
            dataset_sha256=described.dataset_sha256,
            dtype=dtype,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            files=export_manifest.describe(folder, (path.name for path in folder.iterdir())),
        )
        _publish(folder, whole, out)
    log.info("exported step %d of %s to %s", whole.step, whole.run, out.uri)
    return whole


def _read(source: str) -> tuple[CheckpointManifest, TrainConfig, Any]:
    """What a checkpoint says of itself, its job, and its model."""
    config_json = checkpoint.read_model_config(source)
    job = checkpoint.read_train_config(source)
    described, state = checkpoint.read_model_state(source)
    if config_json is None:
        raise ConfigError(
            f"{source}: its model comes from model.factory and has no config.json; "
            "only models of transformers can be exported"
        )
    return described, job, _assemble(json.loads(config_json), state, source)


def _write_tokenizer(job: TrainConfig, described: CheckpointManifest, folder: Path) -> None:
    uri = job.data.uri
    if index_digest(uri) != described.dataset_sha256:
        raise DataError(
            f"{uri}: is not the dataset that {described.run} was trained on (the index has another "
            "checksum); put the original back, since the tokenizer comes from there"
        )
    for name, data in read_tokenizer_files(uri).items():
        (folder / name).write_bytes(data)


def _assemble(config: dict[str, Any], state: Mapping[str, torch.Tensor], source: str) -> Any:
    """The model around the checkpoint's tensors, which are taken over and not copied."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), dtype=torch.float32
        )
    names = set(model.state_dict())
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    lacking = sorted(names - tied - set(state))
    surplus = sorted(set(state) - names)
    if lacking or surplus:
        raise CheckpointError(
            f"{source}: does not fit its config.json: "
            + (f"tensor {lacking[0]} is missing" if lacking else f"no place for {surplus[0]}")
        )
    model.load_state_dict(dict(state), strict=False, assign=True)
    model.tie_weights()
    return model


def _set_special_tokens(model: Any, folder: Path) -> None:
    """End, begin and pad token as the tokenizer has them, so that every reader sees the same."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids)


def _save(model: Any, folder: Path, dtype: Dtype) -> None:
    model.config.use_cache = True
    model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    model.save_pretrained(folder)


def _publish(folder: Path, whole: ExportManifest, out: Storage) -> None:
    """Put the files that are not there yet, then the manifest.

    Raises AlreadyExists, with nothing written, if one of them is there with other contents, or if
    there is anything else.
    """
    data = export_manifest.to_bytes(whole)
    present = {info.key for info in out.list()}
    wanted = {file.key: file for file in whole.files}
    foreign = sorted(present - set(wanted) - {MANIFEST})
    foreign += [key for key in sorted(present & set(wanted)) if not _is_same(out, wanted[key])]
    if MANIFEST in present and out.get(MANIFEST) != data:
        foreign.insert(0, MANIFEST)
    if foreign:
        raise AlreadyExists(
            f"{out.uri}: already holds other data ({foreign[0]}"
            + (f" and {len(foreign) - 1} more" if len(foreign) > 1 else "")
            + "); nothing was written: export to another place, or remove it first"
        )
    for key in sorted(set(wanted) - present):
        out.put_file(key, folder / key)
    if MANIFEST not in present:
        out.put(MANIFEST, data, if_absent=True)


def _is_same(out: Storage, file: ExportedFile) -> bool:
    return (
        out.size(file.key) == file.size_bytes
        and sha256_of_stored(out, file.key, file.size_bytes) == file.sha256
    )
