"""The models of a configuration, as an engine of this machine is to load them.

Promises: what can be seen to be wrong with the model, its draft or their quantization is said
before an engine starts; a path that is given back has been verified.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebbtide.platform.errors import ServeError
from ebbtide.platform.storage import LocalStorage, open_storage
from ebbtide.serve.config import Scheme, ServeConfig
from ebbtide.serve.model_cache import borrowed, cache_root, give_back
from ebbtide.serve.model_files import check_servable, described, fetch
from ebbtide.serve.quantize import check_quantizable, quantized


@borrowed()
def check(config: ServeConfig) -> None:
    """Raise ServeError for what an engine would stumble over."""
    folder = fetch(config.model.uri)
    check_servable(folder, config)
    if config.quantization is not None:
        check_quantizable(folder, config.quantization)
    if config.speculation is not None and config.speculation.draft is not None:
        draft = fetch(config.speculation.draft)
        check_servable(draft, config)
        _check_draft(folder, draft)


def _check_draft(model: Path, draft: Path) -> None:
    """Raise ServeError for a draft whose tokens are not those of the model."""
    sizes = [described(folder).get("vocab_size") for folder in (model, draft)]
    if sizes[0] != sizes[1]:
        raise ServeError(
            f"{draft}: has a vocabulary of {sizes[1]} tokens, but the model has {sizes[0]}; "
            "a draft must be of the same tokenizer"
        )
    vocabularies = [_vocabulary(folder) for folder in (model, draft)]
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise ServeError(
            f"{draft}: its tokenizer has other tokens than the model's; a draft must be of the same"
            " tokenizer, or no guess would ever be right"
        )


def _vocabulary(folder: Path) -> Any:
    """None where the tokenizer is in another format."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes()).get("model", {}).get("vocab")
    except ValueError as error:
        raise ServeError(f"{path}: is not valid JSON: {error}") from error


def prepared(uri: str, scheme: Scheme | None) -> Path:
    """The directory to load; quantized if there is a scheme, which takes a while once a machine."""
    folder = fetch(uri)
    if scheme is None:
        return folder
    copy = quantized(folder, scheme, cache_root())
    give_back(folder)
    return copy


@borrowed()
def max_model_len(config: ServeConfig) -> int:
    """The longest prompt and answer, in tokens. Raises ServeError if nothing says it."""
    folder = fetch(config.model.uri)
    found = config.model.max_model_len or described(folder).get("max_position_embeddings")
    if not isinstance(found, int):
        raise ServeError(f"{folder}: config.json names no length; set model.max_model_len")
    return found


@borrowed()
def vocab_size(config: ServeConfig) -> int:
    """How many tokens the model knows; 0 if its configuration does not say."""
    return int(described(fetch(config.model.uri)).get("vocab_size") or 0)


def absolute(config: ServeConfig) -> ServeConfig:
    """With local paths as processes in other working directories understand them."""
    model = config.model.model_copy(update={"uri": _absolute(config.model.uri)})
    speculation = config.speculation
    if speculation is not None and speculation.draft is not None:
        speculation = speculation.model_copy(update={"draft": _absolute(speculation.draft)})
    ledger = None if config.ledger is None else _absolute(config.ledger)
    return config.model_copy(update={"model": model, "speculation": speculation, "ledger": ledger})


def _absolute(uri: str) -> str:
    storage = open_storage(uri)
    return storage.uri if isinstance(storage, LocalStorage) else uri
