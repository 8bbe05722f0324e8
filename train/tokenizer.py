"""The tokenizer of a dataset: a given Hugging Face ``tokenizer.json``, or a BPE made for the text.

Promises: the files are a directory that ``transformers.AutoTokenizer`` loads, with end-of-text,
begin and pad tokens and a chat template; text never turns into a special token, whatever it holds;
the same text gives the same bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ebbtide.platform.errors import ConfigError, DataError, NotFound
from ebbtide.platform.storage import Storage, join, open_storage

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
EOS_TOKEN = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
"""Every byte, and the end-of-text token."""

_KNOWN_EOS = (EOS_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
_LEAVE_S = 2.0  # for an interrupted training to stop taking texts
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer ready to encode documents, and the files that are kept of it, by name."""

    tokenizer: Tokenizer
    files: Mapping[str, bytes]
    vocab_size: int
    eos_id: int

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of every text, on all cores; no special token is added or recognised."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens (fewer if the text has too few pairs).

    Raises ConfigError for a vocabulary too small to hold every byte.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"a byte-level vocabulary needs {MIN_VOCAB_SIZE} tokens or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _interruptibly(lambda texts: tokenizer.train_from_iterator(texts, trainer), texts)
    data = tokenizer.to_str(pretty=True).encode()
    return _ready(tokenizer, {TOKENIZER_FILE: data}, {}, EOS_TOKEN)


def _interruptibly(act: Callable[[Iterator[str]], None], texts: Iterable[str]) -> None:
    """Run what may stay in native code for minutes so that Ctrl-C is still answered at once.

    Then ``texts`` end: a thread that were still taking them would abort the process at its exit.
    """
    done: Future[None] = Future()
    interrupted = threading.Event()

    def run() -> None:
        try:
            act(itertools.takewhile(lambda _: not interrupted.is_set(), texts))
            done.set_result(None)
        except BaseException as error:  # to the caller, whatever it is
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True, name="train-tokenizer")
    thread.start()
    try:
        done.result()
    except BaseException:
        interrupted.set()
        thread.join(_LEAVE_S)
        raise


def load_tokenizer(uri: str) -> TextTokenizer:
    """The tokenizer of a ``tokenizer.json``, or of a directory (local or ``s3://``) that holds one.

    A ``tokenizer_config.json`` beside it names the end-of-text token and is kept.
    Raises NotFound, or DataError for what is not a tokenizer or has no end-of-text token.
    """
    is_file = uri.endswith(".json") or os.path.isfile(uri)
    where = uri if is_file else join(uri, TOKENIZER_FILE)
    parent, _, name = where.rpartition("/")
    storage = open_storage(parent or ("/" if where.startswith("/") else "."))
    try:
        data = storage.get(name)
    except NotFound as error:
        raise NotFound(f"{where}: no tokenizer here; give a tokenizer.json") from error
    companions = _companions(storage)
    try:
        config = json.loads(companions.pop(CONFIG_FILE, b"{}"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise DataError(f"{join(storage.uri, CONFIG_FILE)}: is not valid: {error}") from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{where}: is not a Hugging Face tokenizer: {error}") from error
    files = {TOKENIZER_FILE: data, **companions}
    return _ready(tokenizer, files, config, _eos_token(tokenizer, config, where))


def _companions(storage: Storage) -> dict[str, bytes]:
    """What lies beside a tokenizer.json and belongs to it."""
    found = {}
    for name in (CONFIG_FILE, CHAT_TEMPLATE_FILE):
        with contextlib.suppress(NotFound):
            found[name] = storage.get(name)
    return found


def _eos_token(tokenizer: Tokenizer, config: Mapping[str, Any], where: str) -> str:
    named = config.get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    if named is not None:
        if tokenizer.token_to_id(named) is None:
            raise DataError(
                f"{where}: eos_token {named!r} of {CONFIG_FILE} is not in its vocabulary"
            )
        return str(named)
    for token in _KNOWN_EOS:
        if tokenizer.token_to_id(token) is not None:
            return token
    raise DataError(
        f"{where}: no end-of-text token; name it as eos_token in a {CONFIG_FILE} beside it"
    )


def _ready(
    tokenizer: Tokenizer, files: Mapping[str, bytes], config: Mapping[str, Any], eos_token: str
) -> TextTokenizer:
    kept = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eos_token,
        "eos_token": eos_token,
        "pad_token": eos_token,
        "clean_up_tokenization_spaces": False,
    }
    if CHAT_TEMPLATE_FILE not in files:
        kept["chat_template"] = _CHAT_TEMPLATE
    kept.update({name: value for name, value in config.items() if value is not None})
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    eos_id = tokenizer.token_to_id(eos_token)
    assert eos_id is not None
    return TextTokenizer(
        tokenizer,
        {**files, CONFIG_FILE: json.dumps(kept, indent=2).encode() + b"\n"},
        max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        eos_id,
    )
