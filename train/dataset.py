"""Prepared token shards: the index that describes them, and the sequences cut out of them.

Layout under a dataset's URI::

    index.json                        written last: no index, no dataset
    tokenizer/<sha256>/               what transformers.AutoTokenizer loads
    train/00000-<sha256>.arrow        one Arrow record batch, column ``tokens``: a list per document
    validation/00000-<sha256>.arrow

The lists of a split, one after the other, are its token stream; every document ends with the
end-of-text token, and one that crosses a shard's end goes on as the first list of the next.
Promises: a shard is checked against its SHA-256 before its first use, then memory-mapped; every
token of a split but the very first is a label exactly once.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from ebbtide.platform.checksums import sha256
from ebbtide.platform.config import Config
from ebbtide.platform.errors import DataError, NotFound
from ebbtide.platform.storage import LocalStorage, Storage, open_storage

INDEX_KEY = "index.json"
IGNORE_LABEL = -100
_MAX_OPEN_SHARDS = 1024

Split = Literal["train", "validation"]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StoredFile(Config):
    """One object of the dataset, by its key under the dataset's URI."""

    key: str
    size_bytes: Count
    sha256: Sha256


class ShardInfo(StoredFile):
    """One token shard; ``documents`` counts those that begin in it."""

    tokens: Count
    documents: Count


class SplitInfo(Config):
    """All shards of a split, in the order of its token stream."""

    documents: Count
    tokens: Count
    shards: tuple[ShardInfo, ...]

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise ValueError("the shards do not add up to its tokens")
        return self


class DatasetIndex(Config):
    """What ``index.json`` holds.

    ``unigram_entropy`` is that of all tokens of both splits, in nats per token: the loss of the
    best model that knows only how often each token occurs. ``inputs_digest`` identifies the text
    and the settings that the dataset was prepared from.
    """

    format_version: Literal[1] = 1
    inputs_digest: Sha256
    vocab_size: Annotated[int, Field(ge=1)]
    eos_id: Count
    tokenizer: tuple[StoredFile, ...]
    corpus_bytes: Count
    unigram_entropy: Annotated[float, Field(ge=0)]
    skipped: dict[str, Count]
    splits: dict[Split, SplitInfo]

    @model_validator(mode="after")
    def _has_both_splits(self) -> Self:
        lacking = [split for split in get_args(Split) if split not in self.splits]
        if lacking:
            raise ValueError(f"split {' and '.join(lacking)} is missing")
        return self


def _index_bytes(uri: str) -> bytes:
    try:
        return open_storage(uri).get(INDEX_KEY)
    except NotFound as error:
        raise NotFound(
            f"{uri}: no prepared dataset here ({INDEX_KEY} is missing); "
            f"make one with `ebbtide data prepare SOURCE... --out {uri}`"
        ) from error


def parse_index(data: bytes, uri: str) -> DatasetIndex:
    """The index from its bytes. Raises DataError."""
    try:
        return DatasetIndex.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(str(part) for part in fault["loc"]) or "the file"
        message = fault["msg"].removeprefix("Value error, ")
        raise DataError(
            f"{uri}/{INDEX_KEY}: {name}: {message}; it is damaged or of another version of "
            "ebbtide: prepare the dataset again into another place"
        ) from error


def read_index(uri: str) -> DatasetIndex:
    """The index of a dataset. Raises NotFound if there is none, DataError if it is damaged."""
    return parse_index(_index_bytes(uri), uri)


def index_digest(uri: str) -> str:
    """SHA-256 of the index, and through its checksums of the whole dataset. Raises NotFound."""
    return sha256(_index_bytes(uri))


def read_tokenizer_files(uri: str) -> Mapping[str, bytes]:
    """The tokenizer's files by plain name. Raises DataError for one that is damaged."""
    storage = open_storage(uri)
    files = {}
    for file in read_index(uri).tokenizer:
        data = storage.get(file.key)
        _check(file, data, uri)
        files[file.key.rpartition("/")[2]] = data
    return files


def is_whole(file: StoredFile, data: bytes | memoryview) -> bool:
    """Whether these are the file's bytes, by size and SHA-256."""
    return len(data) == file.size_bytes and sha256(data) == file.sha256


def _check(file: StoredFile, data: bytes | memoryview, uri: str) -> None:
    if not is_whole(file, data):
        raise DataError(
            f"{uri}/{file.key}: is damaged ({len(data)} of {file.size_bytes} bytes, or another "
            "SHA-256): restore it or prepare the dataset again"
        )


class TokenDataset:
    """The sequences of one split, by number.

    Sequence ``i`` has inputs ``tokens[i*T : i*T+T]`` and as labels the token after each. Shards of
    a local dataset are mapped where they are; others are fetched once a machine into ``cache_dir``
    (default: a folder of this user under the system's temporary directory), under their checksum.
    Raises NotFound or DataError as :func:`read_index` does, DataError for a split too small.
    """

    def __init__(
        self, uri: str, split: Split, sequence_length: int, cache_dir: Path | None = None
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, not {sequence_length}")
        self._arguments = (uri, split, sequence_length, cache_dir)
        self.uri, self.split, self.sequence_length = uri, split, sequence_length
        self.index = read_index(uri)
        info = self.index.splits[split]
        if info.tokens < 2:
            raise DataError(f"{uri}: split {split} has {info.tokens} tokens; at least 2 are needed")
        self.num_sequences = -(-(info.tokens - 1) // sequence_length)
        self._storage = open_storage(uri)
        self._cache_dir = cache_dir or Path(tempfile.gettempdir(), f"ebbtide-shards-{os.getuid()}")
        self._shards = info.shards
        self._ends = np.cumsum([shard.tokens for shard in info.shards])
        self._open: dict[int, NDArray[Any]] = {}

    def __reduce__(self) -> tuple[type[TokenDataset], tuple[Any, ...]]:
        return TokenDataset, self._arguments  # a map of memory does not travel between processes

    def sequence(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and labels of sequence ``i``, ``int64[sequence_length]`` each.

        The last sequence is filled up with the end-of-text token; the surplus labels are -100.
        Raises IndexError, and DataError that names a shard whose bytes are wrong.
        """
        if not 0 <= i < self.num_sequences:
            raise IndexError(f"sequence {i} of {self.num_sequences}")
        length = self.sequence_length
        window = self._tokens(i * length, length + 1)
        inputs = np.full(length, self.index.eos_id, np.int64)
        labels = np.full(length, IGNORE_LABEL, np.int64)
        inputs[: min(length, len(window))] = window[:length]
        labels[: len(window) - 1] = window[1:]
        return inputs, labels

    def _tokens(self, start: int, count: int) -> NDArray[Any]:
        """Up to ``count`` tokens of the split's stream; fewer at its end."""
        parts = []
        number = int(np.searchsorted(self._ends, start, side="right"))
        while count and number < len(self._shards):
            offset = start - (int(self._ends[number]) - self._shards[number].tokens)
            part = self._shard(number)[offset : offset + count]
            parts.append(part)
            start, count, number = start + len(part), count - len(part), number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _shard(self, number: int) -> NDArray[Any]:
        tokens = self._open.get(number)
        if tokens is None:
            if len(self._open) >= _MAX_OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
            tokens = self._open[number] = map_shard(
                self._storage, self._shards[number], self._cache_dir
            )
        return tokens


def pack_shard(tokens: NDArray[Any], list_starts: NDArray[np.int32]) -> bytes:
    """The bytes of a shard: its tokens (uint16 or uint32), cut into lists at ``list_starts``."""
    import pyarrow as pa

    offsets = pa.array(np.append(list_starts, np.int32(len(tokens))))
    column = pa.ListArray.from_arrays(offsets, pa.array(tokens))
    batch = pa.record_batch([column], names=["tokens"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def map_shard(storage: Storage, shard: ShardInfo, cache_dir: Path) -> NDArray[Any]:
    """A shard's tokens, checked and memory-mapped. Raises NotFound or DataError that names it."""
    import pyarrow as pa

    try:
        if isinstance(storage, LocalStorage):
            data = _map(Path(storage.uri, shard.key))
        else:
            path = cache_dir / f"{shard.sha256}.arrow"
            if not path.exists() or not is_whole(shard, _map(path)):
                storage.get_file(shard.key, path)
            data = _map(path)
    except FileNotFoundError as error:
        raise NotFound(
            f"{storage.uri}/{shard.key}: not there, though the index names it; "
            "restore it or prepare the dataset again"
        ) from error
    except OSError as error:
        raise DataError(f"{storage.uri}/{shard.key}: cannot be read: {error}") from error
    _check(shard, data, storage.uri)
    column = pa.ipc.open_file(pa.py_buffer(data)).get_batch(0).column(0)
    assert isinstance(column, pa.ListArray)
    values: NDArray[Any] = column.values.to_numpy(zero_copy_only=True)
    if len(values) != shard.tokens:
        raise DataError(
            f"{storage.uri}/{shard.key}: holds {len(values)} tokens, but the index says "
            f"{shard.tokens}: restore {INDEX_KEY} or prepare the dataset into another place"
        )
    return values


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
