"""Text to token shards: what ``ebbtide data prepare`` does.

Two passes over the sources. The first surveys the text (digest, split, sample for the tokenizer),
the second encodes it on all cores and writes shards; the index comes last. Memory is bounded by
batches, shards and the tokenizer's sample, never by the corpus.

Promises: the same text and settings give the same bytes, wherever the files lie. An output that
holds anything else is refused untouched; one that holds this very dataset is left as it is; one
that an interrupted prepare left behind, or whose files are damaged, is completed. Of several that
prepare into one place at once, the first to write the index wins: every other file's key carries
its checksum, so that nobody overwrites another's, and a loser removes what it wrote.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ebbtide.platform.checksums import sha256
from ebbtide.platform.config import Config
from ebbtide.platform.errors import AlreadyExists, DataError, NotFound
from ebbtide.platform.storage import LocalStorage, Storage, open_storage, probe
from ebbtide.train.dataset import (
    INDEX_KEY,
    DatasetIndex,
    Split,
    StoredFile,
    is_whole,
    parse_index,
)
from ebbtide.train.documents import Piece, Skips, read_documents
from ebbtide.train.sources import Filter, SourceFile, find_sources
from ebbtide.train.survey import Survey, TextDigest, assign_splits, decide_split, survey
from ebbtide.train.token_writer import SplitWriter, unigram_entropy
from ebbtide.train.tokenizer import (
    MIN_VOCAB_SIZE,
    TextTokenizer,
    load_tokenizer,
    train_tokenizer,
)

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, the bytes of text done, and the bytes in all where they are known."""

SHARD_TOKENS = 2**22
TOKENIZER_SAMPLE_BYTES = 64 * 2**20
_BATCH_BYTES = 2**20  # a second or so of encoding: Ctrl-C waits for no more
_PROGRESS_BYTES = 2**18
_MARKER_KEY = "prepare.incomplete"
_OWN_KEY = re.compile(
    r"(train|validation)/\d{5,}-[0-9a-f]{12}\.arrow|tokenizer/[0-9a-f]{12}/[a-z_]+\.(json|jinja)"
)
_SPLITS: tuple[Split, ...] = ("train", "validation")

Text = Annotated[str, Field(min_length=1)]


class PrepareConfig(Config):
    """What is prepared, where to, and how. ``tokenizer`` None trains one of ``vocab_size``."""

    sources: Annotated[tuple[Text, ...], Field(min_length=1)]
    out: Text
    tokenizer: Text | None = None
    vocab_size: Annotated[int, Field(ge=MIN_VOCAB_SIZE, le=2**20)] = 4096
    text_column: Text = "text"
    globs: tuple[Text, ...] = ()
    excludes: tuple[Text, ...] = ()
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    max_bytes: Annotated[int, Field(ge=1)] | None = None
    strict: bool = False
    shard_tokens: Annotated[int, Field(ge=1, lt=2**31)] = SHARD_TOKENS


@dataclass(frozen=True)
class PrepareResult:
    """The dataset's index; ``already`` if it was there before and nothing had to be written."""

    uri: str
    index: DatasetIndex
    already: bool


@dataclass(frozen=True)
class _Found:
    """What an output holds: a dataset, the remains of an interrupted prepare, or nothing."""

    sizes: dict[str, int]  # of every object, by key
    index: DatasetIndex | None


def prepare(config: PrepareConfig, on_progress: Progress = lambda *_: None) -> PrepareResult:
    """Prepare a dataset. Raises DataError for text that cannot be used, AlreadyExists for an output
    that holds other data, StorageError or AccessError for one that cannot be written."""
    storage = open_storage(config.out)
    without = Path(storage.uri) if isinstance(storage, LocalStorage) else None
    files = find_sources(config.sources, Filter(config.globs, config.excludes), without)
    found = _inspect(storage)
    given = load_tokenizer(config.tokenizer) if config.tokenizer else None
    if found.index is None:
        probe(storage)

    skips = Skips(config.strict)
    surveyed = _survey(config, files, skips, on_progress)
    digest = _inputs_digest(config, surveyed, given)
    if found.index is not None:
        if found.index.inputs_digest != digest:
            raise AlreadyExists(_other_dataset(config))
        faults = _faults(storage, found.sizes, found.index)
        if not faults:
            _clean(storage, found.sizes, found.index)
            return PrepareResult(config.out, found.index, already=True)
        logger.warning("%s: %s: preparing again", config.out, _in_short(faults))

    storage.put(_MARKER_KEY, b"written over by the next prepare\n")
    tokenizer = given or _train(config, surveyed, on_progress)
    index = _write(config, storage, files, surveyed, tokenizer, digest, skips, on_progress)
    data = index.model_dump_json(indent=2).encode() + b"\n"
    try:
        storage.put(INDEX_KEY, data, if_absent=found.index is None)
    except AlreadyExists as error:
        winner = parse_index(storage.get(INDEX_KEY), config.out)
        _clean(storage, [*_files(index), _MARKER_KEY], winner)
        if winner.inputs_digest != digest:
            raise AlreadyExists(_other_dataset(config)) from error
        return PrepareResult(config.out, winner, already=True)
    _clean(storage, [*found.sizes, _MARKER_KEY], index)
    return PrepareResult(config.out, index, already=False)


def _other_dataset(config: PrepareConfig) -> str:
    return (
        f"{config.out}: already holds a dataset of other text or settings; "
        "nothing was changed: choose another place"
    )


def _files(index: DatasetIndex) -> dict[str, StoredFile]:
    """Every file that an index names, by key."""
    shards = (shard for split in index.splits.values() for shard in split.shards)
    return {file.key: file for file in (*index.tokenizer, *shards)}


def _faults(storage: Storage, sizes: Mapping[str, int], index: DatasetIndex) -> list[str]:
    """What is wrong with the files that an index names."""
    faults = []
    for key, file in _files(index).items():
        try:
            if key not in sizes:
                faults.append(f"{key} is missing")
            elif sizes[key] != file.size_bytes or not is_whole(file, storage.get(key)):
                faults.append(f"{key} is damaged")
        except NotFound:  # deleted since the listing
            faults.append(f"{key} is missing")
    return faults


def _in_short(faults: Sequence[str], most: int = 5) -> str:
    more = [f"{len(faults) - most} more"] * (len(faults) > most)
    return ", ".join([*faults[:most], *more])


def _inspect(storage: Storage) -> _Found:
    sizes = {
        info.key: info.size_bytes
        for info in storage.list()
        if not info.key.startswith(".probe-")  # of another prepare that begins
    }
    refused = f"{storage.uri}: already holds other data ({next(iter(sizes), '')}, ...); "
    refused += "nothing was changed: choose an empty place"
    if INDEX_KEY in sizes:
        try:
            return _Found(sizes, parse_index(storage.get(INDEX_KEY), storage.uri))
        except DataError as error:
            raise AlreadyExists(refused) from error
    if sizes and _MARKER_KEY not in sizes:
        raise AlreadyExists(refused)
    return _Found(sizes, None)


def _survey(
    config: PrepareConfig, files: Sequence[SourceFile], skips: Skips, on_progress: Progress
) -> Survey:
    pieces = read_documents(files, config.text_column, skips, config.max_bytes)
    sample_bytes = 0 if config.tokenizer else TOKENIZER_SAMPLE_BYTES
    surveyed = survey(_counted(pieces, "read", None, on_progress), config.seed, sample_bytes)
    if not surveyed.documents:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(skips.counts.items()))
        raise DataError(
            f"{', '.join(config.sources)}: no text in {len(files)} file(s)"
            + (f" (skipped: {why})" if why else "")
        )
    if surveyed.lowest == surveyed.highest:
        logger.warning(
            "only one document (or copies of one): the last %.3g%% of its text, not a document, "
            "becomes the validation split",
            100 * config.validation_fraction,
        )
    return surveyed


def _inputs_digest(config: PrepareConfig, surveyed: Survey, tokenizer: TextTokenizer | None) -> str:
    """Identifies all that the dataset's bytes depend on."""
    if tokenizer is None:
        made = f"byte-level BPE of {config.vocab_size}"
    else:
        made = str(sorted((name, sha256(data)) for name, data in tokenizer.files.items()))
    settings = [config.validation_fraction, config.seed, config.shard_tokens]
    return sha256(json.dumps([surveyed.digest, made, *settings]).encode())


def _train(config: PrepareConfig, surveyed: Survey, on_progress: Progress) -> TextTokenizer:
    sample_bytes = sum(map(len, surveyed.sample))
    if sample_bytes < surveyed.corpus_bytes:
        logger.info("the tokenizer is trained on a sample of %d MB", sample_bytes // 10**6)
    on_progress("train tokenizer", 0, None)
    return train_tokenizer((data.decode() for data in surveyed.sample), config.vocab_size)


def _write(
    config: PrepareConfig,
    storage: Storage,
    files: Sequence[SourceFile],
    surveyed: Survey,
    tokenizer: TextTokenizer,
    inputs_digest: str,
    skips: Skips,
    on_progress: Progress,
) -> DatasetIndex:
    tokenizer_files = _store_tokenizer(storage, tokenizer)
    writers = {
        split: SplitWriter(
            storage, split, tokenizer.vocab_size, tokenizer.eos_id, config.shard_tokens
        )
        for split in _SPLITS
    }
    seen = TextDigest()
    pieces = read_documents(files, config.text_column, Skips(quiet=True), config.max_bytes)
    pieces = _counted(_digested(pieces, seen), "encode", surveyed.corpus_bytes, on_progress)
    rule = decide_split(surveyed, config.validation_fraction)
    for batch in _batches(assign_splits(pieces, rule, config.seed)):
        encoded = tokenizer.encode([piece.data.decode() for _, piece in batch])
        for (split, piece), ids in zip(batch, encoded, strict=True):
            writers[split].add(ids, piece.starts)
    if seen.hexdigest() != surveyed.digest:
        raise DataError(f"{', '.join(config.sources)}: changed while being read; prepare again")

    splits = {split: writers[split].finish() for split in _SPLITS}
    for split, info in splits.items():
        if info.tokens < 2:
            raise DataError(
                f"{', '.join(config.sources)}: too little text, nothing is left for {split}"
            )
    return DatasetIndex(
        inputs_digest=inputs_digest,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer=tokenizer_files,
        corpus_bytes=surveyed.corpus_bytes,
        unigram_entropy=unigram_entropy(writers["train"].counts + writers["validation"].counts),
        skipped=dict(sorted(skips.counts.items())),
        splits=splits,
    )


def _store_tokenizer(storage: Storage, tokenizer: TextTokenizer) -> tuple[StoredFile, ...]:
    files = sorted(tokenizer.files.items())
    digest = sha256(repr([(name, sha256(data)) for name, data in files]).encode())
    stored = []
    for name, data in files:
        key = f"tokenizer/{digest[:12]}/{name}"
        storage.put(key, data)
        stored.append(StoredFile(key=key, size_bytes=len(data), sha256=sha256(data)))
    return tuple(stored)


def _digested(pieces: Iterable[Piece], digest: TextDigest) -> Iterator[Piece]:
    for piece in pieces:
        digest.add(piece)
        yield piece


def _counted(
    pieces: Iterable[Piece], stage: str, total: int | None, on_progress: Progress
) -> Iterator[Piece]:
    done = said = 0
    on_progress(stage, 0, total)
    for piece in pieces:
        yield piece
        done += len(piece.data)
        if done - said >= _PROGRESS_BYTES:
            said = done
            on_progress(stage, done, total)
    on_progress(stage, done, total)


def _batches(pieces: Iterable[tuple[Split, Piece]]) -> Iterator[list[tuple[Split, Piece]]]:
    batch: list[tuple[Split, Piece]] = []
    batch_bytes = 0
    for split, piece in pieces:
        batch.append((split, piece))
        batch_bytes += len(piece.data)
        if batch_bytes >= _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def _clean(storage: Storage, keys: Iterable[str], index: DatasetIndex) -> None:
    """Remove those of ``keys`` that only a prepare writes and that the index does not name."""
    named = _files(index)
    for key in keys:
        if key == _MARKER_KEY or (_OWN_KEY.fullmatch(key) and key not in named):
            storage.delete(key)
