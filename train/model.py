"""The model of a job: any causal LM of transformers, or a user's own.

A model is called with token ids, int64 ``[batch, sequence]``, and returns logits
``[batch, sequence, vocabulary]`` or an object that has them as ``.logits``. Promises: the weights
of a fresh model are a function of (configuration, seed), in fp32 on the CPU; what cannot work (no
weights, a vocabulary or a context too small) is a ConfigError before anything is trained.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ebbtide.platform.errors import ConfigError, EbbtideError, NotFound
from ebbtide.platform.scratch import scratch_folder
from ebbtide.platform.storage import LocalStorage, Storage, open_storage
from ebbtide.train.config import ModelConfig

_CONFIG = "config.json"
_WEIGHTS = ".safetensors"


def resolve(spec: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; the working directory is searched first.

    Raises ConfigError if it is not there, or if importing the module fails.
    """
    module_name, _, name = spec.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{spec}: importing {module_name} from {here} failed: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{spec}: {module.__file__ or module_name} has no function {name!r}")
    return cast(Callable[..., Any], function)


def build_model(
    config: ModelConfig, vocab_size: int, seed: int, *, blank: bool = False
) -> nn.Module:
    """The model in fp32 on the CPU; the same for the same arguments, in any process.

    ``vocab_size`` is the data's. Raises ConfigError naming both if it does not fit the model's.
    ``blank``: parameters are to be filled from elsewhere, so that they need not be read or drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.factory is not None:
            model = _from_factory(config.factory, vocab_size)
        else:
            assert config.source is not None  # ModelConfig sees to it
            model = _from_source(config.source, config.weights, blank)
    _check_vocabulary(model, vocab_size)
    return model.to(torch.float32).train()


def check_model(config: ModelConfig, vocab_size: int, sequence_length: int) -> None:
    """Raise the ConfigErrors of a model that can be seen without building it."""
    if config.loss is not None:
        resolve(config.loss)
    if config.factory is not None:
        _resolve_factory(config.factory)
        return
    assert config.source is not None
    with _fetched(config.source, config.weights) as folder:
        text = _text_config(config.source, _read_config(config.source, folder))
    _require_vocabulary(text.vocab_size, vocab_size)
    context = getattr(text, "max_position_embeddings", None)
    if context is not None and sequence_length > context:
        raise ConfigError(
            f"data.sequence_length is {sequence_length}, but {config.source} has positions for "
            f"{context} tokens (max_position_embeddings); shorten the one or raise the other"
        )


def has_source(source: str) -> bool:
    """Whether a model's description can be read at ``model.source`` from here."""
    try:
        with _fetched(source, "random"):
            return True
    except EbbtideError:
        return False


def config_json(model: nn.Module) -> str | None:
    """The ``config.json`` of a model of transformers, ready for inference; None for others."""
    found: Any = getattr(model, "config", None)
    if not hasattr(found, "to_json_string"):
        return None
    ready = copy.copy(found)
    ready.use_cache = True
    return cast(str, ready.to_json_string(use_diff=False))


def _from_factory(spec: str, vocab_size: int) -> nn.Module:
    model = _resolve_factory(spec)(vocab_size=vocab_size)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{spec} returned {type(model).__name__}, not a torch.nn.Module")
    return model


def _resolve_factory(spec: str) -> Callable[..., Any]:
    factory = resolve(spec)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some of what is written in C has none
        return factory
    try:
        signature.bind(vocab_size=1)
    except TypeError as error:
        raise ConfigError(f"{spec} must take vocab_size as a keyword: {error}") from error
    return factory


def _from_source(source: str, weights: str, blank: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with _fetched(source, "random" if blank else weights) as folder:
        config = _read_config(source, folder)
        config.use_cache = False  # keys and values of past tokens are of no use in training
        try:
            if blank:
                model = _without_values(config)
            elif weights == "random":
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            else:
                model = _load_weights(source, folder, config)
        except EbbtideError:
            raise
        except Exception as error:  # whatever a wrong value leads to
            raise ConfigError(
                f"{source}: transformers cannot build a causal LM from it: "
                f"{_reason(error, source, folder)}"
            ) from error
    return cast(nn.Module, model)


def _without_values(config: Any) -> Any:
    """A model of transformers with whatever is in memory as parameters; its buffers are set."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model.init_weights()  # what is left: buffers, and parameters that are one
    return model


def _load_weights(source: str, folder: Path, config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    lacking = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if lacking:
        raise ConfigError(
            f"{source}: {len(lacking)} tensors are missing or of another shape, {lacking[0]} "
            "first; give the whole model, or model.weights: random"
        )
    return model


def _read_config(source: str, folder: Path) -> Any:
    """The configuration of a causal LM, else ConfigError."""
    from transformers import AutoConfig

    try:
        if not isinstance(json.loads((folder / _CONFIG).read_bytes()), dict):
            raise ValueError("it is not a JSON object")
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # whatever a wrong value leads to
        raise ConfigError(
            f"{source}: not a model configuration: {_reason(error, source, folder)}"
        ) from error
    _require_causal_lm(source, config)
    return config


def _require_causal_lm(source: str, config: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    kind = type(config)
    if kind not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"{source}: model_type {config.model_type} is not a causal LM of transformers; give "
            "one that is (llama, gpt2, qwen3, ...), or a model.factory"
        )
    looks_ahead = (
        getattr(config, "is_decoder", None) is False
        and not getattr(config, "is_encoder_decoder", False)
        and kind in AutoModelForMaskedLM._model_mapping
    )
    if looks_ahead:
        raise ConfigError(
            f"{source}: model_type {config.model_type} is an encoder, not a causal LM: its tokens "
            "see those after them; set is_decoder to true in it, or give a causal LM"
        )


def _text_config(source: str, config: Any) -> Any:
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise ConfigError(f"{source}: more than a causal LM of text: {error}") from error
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ConfigError(f"{source}: the model's vocab_size is not known; put it in")
    return text


def _reason(error: Exception, source: str, folder: Path) -> str:
    """What the error says, in one line, of the user's path and not of a copy of it."""
    text = " ".join(str(error).split())
    text = text.replace(str(folder / _CONFIG), source).replace(str(folder), source)
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


@contextlib.contextmanager
def _fetched(source: str, weights: str) -> Iterator[Path]:
    """A local folder with the source's ``config.json`` and, if wanted, its weights."""
    folder, slash, name = source.rpartition("/")
    if source.endswith(".json"):
        storage = open_storage((folder or "/") if slash else ".")
    else:
        storage, name = open_storage(source), _CONFIG
    try:
        text = storage.get(name)
    except NotFound as error:
        raise ConfigError(
            f"model.source {source}: {name} is not there; give a config.json or a folder with one"
        ) from error
    files = _weight_files(source, storage) if weights == "pretrained" else []
    if isinstance(storage, LocalStorage) and name == _CONFIG:
        yield Path(storage.uri)
        return
    with scratch_folder("model") as local:
        (local / _CONFIG).write_bytes(text)
        for key in files:
            storage.get_file(key, local / key)
        yield local


def _weight_files(source: str, storage: Storage) -> list[str]:
    keys = [info.key for info in storage.list() if "/" not in info.key]
    if not any(key.endswith(_WEIGHTS) for key in keys):
        raise ConfigError(
            f"model.source {source} has no weights (*{_WEIGHTS}), but model.weights is pretrained; "
            "give a folder with weights, or model.weights: random"
        )
    return [key for key in keys if key.endswith((_WEIGHTS, f"{_WEIGHTS}.index.json"))]


def _check_vocabulary(model: nn.Module, vocab_size: int) -> None:
    try:
        embeddings = cast(Any, model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return
    if isinstance(embeddings, nn.Embedding):
        _require_vocabulary(embeddings.num_embeddings, vocab_size)


def _require_vocabulary(model_vocab_size: int, vocab_size: int) -> None:
    if vocab_size > model_vocab_size:
        raise ConfigError(
            f"the data's vocabulary has {vocab_size} tokens, the model's only {model_vocab_size}; "
            "raise vocab_size in the model's config.json or prepare the data with fewer tokens"
        )
