from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.errors import DataError, NotFound
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import open_storage
from ebbtide.train.dataset import (
    IGNORE_LABEL,
    INDEX_KEY,
    DatasetIndex,
    TokenDataset,
    index_digest,
    read_index,
)
from ebbtide.train.token_writer import SplitWriter

EOS = 0


def write_dataset(
    uri: str, documents: Sequence[Sequence[int]], shard_tokens: int = 7, vocab_size: int = 1000
) -> list[int]:
    """A dataset whose train split holds these documents; returns its token stream."""
    storage = open_storage(uri)
    splits = {}
    for split, held in (("train", documents), ("validation", [[1, 2]])):
        writer = SplitWriter(storage, split, vocab_size, EOS, shard_tokens)  # type: ignore[arg-type]
        for document in held:
            writer.add(list(document), starts=True)
        splits[split] = writer.finish()
    index = DatasetIndex(
        inputs_digest="0" * 64,
        vocab_size=vocab_size,
        eos_id=EOS,
        tokenizer=(),
        corpus_bytes=1,
        unigram_entropy=1.0,
        skipped={},
        splits=splits,  # type: ignore[arg-type]
    )
    storage.put(INDEX_KEY, index.model_dump_json().encode())
    return [token for document in documents for token in (*document, EOS)]


def only_shard(folder: Path) -> Path:
    (shard,) = (folder / "train").iterdir()
    return shard


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 999), max_size=12), min_size=2, max_size=8),
    sequence_length=st.integers(1, 20),
    shard_tokens=st.integers(1, 9),
)
def test_every_token_but_the_first_is_a_label_once(
    documents: list[list[int]], sequence_length: int, shard_tokens: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stream = write_dataset(folder, documents, shard_tokens)
        dataset = TokenDataset(folder, "train", sequence_length)
        sequences = [dataset.sequence(i) for i in range(dataset.num_sequences)]
    labels = np.concatenate([labels for _, labels in sequences])
    inputs = np.concatenate([inputs for inputs, _ in sequences])
    real = labels != IGNORE_LABEL
    assert labels[real].tolist() == stream[1:]
    assert inputs[real].tolist() == stream[:-1]
    # Surplus is at the end of the last sequence only, and less than a sequence.
    assert real[: real.sum()].all() and len(labels) - real.sum() < sequence_length
    assert set(inputs[~real].tolist()) <= {EOS, stream[-1]}
    assert all(part.dtype == np.int64 and len(part) == sequence_length for part in sequences[0])


def test_sequences_and_order_of_asking(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), [[11, 12, 13], [14, 15]])
    dataset = TokenDataset(str(tmp_path), "train", sequence_length=4)
    assert dataset.num_sequences == 2
    inputs, labels = dataset.sequence(1)
    assert inputs.tolist() == [14, 15, EOS, EOS]
    assert labels.tolist() == [15, EOS, IGNORE_LABEL, IGNORE_LABEL]
    assert dataset.sequence(0)[0].tolist() == [11, 12, 13, EOS]
    with pytest.raises(IndexError):
        dataset.sequence(2)
    with pytest.raises(IndexError):
        dataset.sequence(-1)


def test_a_sequence_is_a_copy(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), [[11, 12, 13], [14, 15]])
    dataset = TokenDataset(str(tmp_path), "train", sequence_length=3)
    dataset.sequence(0)[0][:] = 5
    assert dataset.sequence(0)[0].tolist() == [11, 12, 13]


def test_a_large_vocabulary(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), [[70_000, 65_536]], vocab_size=100_000)
    inputs, labels = TokenDataset(str(tmp_path), "train", 2).sequence(0)
    assert inputs.tolist() == [70_000, 65_536]
    assert labels.tolist() == [65_536, EOS]


def test_it_travels_between_processes(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), [[1, 2, 3]])
    dataset = TokenDataset(str(tmp_path), "train", 2)
    dataset.sequence(0)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.sequence(1)[0].tolist() == dataset.sequence(1)[0].tolist()


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="ebbtide data prepare SOURCE"):
        read_index(str(tmp_path))
    with pytest.raises(NotFound):
        TokenDataset(str(tmp_path), "train", 8)


@pytest.mark.parametrize("damage", ["{", "[]", '{"format_version": 2}', "\0"])
def test_a_damaged_index(tmp_path: Path, damage: str) -> None:
    (tmp_path / INDEX_KEY).write_text(damage)
    with pytest.raises(DataError, match=r"index\.json"):
        read_index(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": {}}, "split train and validation is missing"),
        ({"splits": {"train": {"documents": 0, "tokens": 0, "shards": []}}}, "validation is miss"),
        ({"splits": {"train": {"documents": 1, "tokens": 9, "shards": []}}}, "do not add up"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_an_impossible_index_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write_dataset(str(tmp_path), [[1, 2, 3]])
    path = tmp_path / INDEX_KEY
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=message):
        TokenDataset(str(tmp_path), "validation", 2)


def test_a_shard_of_another_length_than_the_index_says(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), [[1, 2, 3]])
    path = tmp_path / INDEX_KEY
    index = json.loads(path.read_text())
    index["splits"]["train"]["tokens"] = index["splits"]["train"]["shards"][0]["tokens"] = 6
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"train/00000-.*holds 4 tokens, but the index says 6"):
        TokenDataset(str(tmp_path), "train", 2).sequence(0)


def test_an_index_of_another_version_is_named(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), [[1, 2]])
    index = json.loads((tmp_path / INDEX_KEY).read_text())
    (tmp_path / INDEX_KEY).write_text(json.dumps({**index, "format_version": 2}))
    with pytest.raises(DataError, match=r"format_version.*another version"):
        read_index(str(tmp_path))


def test_the_index_digest_follows_the_tokens(tmp_path: Path) -> None:
    uris = [str(tmp_path / name) for name in "abc"]
    for uri, document in zip(uris, ([1, 2], [1, 2], [1, 3]), strict=True):
        write_dataset(uri, [document])
    digests = [index_digest(uri) for uri in uris]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    write_dataset(str(tmp_path), [[1, 2, 3, 4]])
    shard = only_shard(tmp_path)
    data = shard.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    shard.write_bytes({"flip": bytes(flipped), "cut": data[:-9], "empty": b""}[damage])
    dataset = TokenDataset(str(tmp_path), "train", 2)
    with pytest.raises(DataError, match=shard.name):
        dataset.sequence(0)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), [[1, 2, 3, 4]])
    only_shard(tmp_path).unlink()
    with pytest.raises(NotFound, match=r"train/00000-.*the index names it"):
        TokenDataset(str(tmp_path), "train", 2).sequence(0)


def test_a_split_of_one_token_is_too_small(tmp_path: Path) -> None:
    write_dataset(str(tmp_path), [[]])
    with pytest.raises(DataError, match="has 1 tokens"):
        TokenDataset(str(tmp_path), "train", 2)


def test_only_the_shards_that_are_asked_for_are_fetched_once(
    tmp_path: Path, s3_server: LocalS3
) -> None:
    uri = f"s3://{s3_server.bucket}/dataset-fetch"
    stream = write_dataset(uri, [list(range(1, 40))], shard_tokens=10)
    cache = tmp_path / "cache"
    dataset = TokenDataset(uri, "train", 5, cache_dir=cache)
    assert dataset.sequence(0)[0].tolist() == stream[:5]
    assert len(list(cache.iterdir())) == 1
    for _ in range(2):
        dataset.sequence(7)
    assert len(list(cache.iterdir())) == 2

    for file in cache.iterdir():  # a damaged copy is fetched again
        file.write_bytes(b"x" * file.stat().st_size)
    assert TokenDataset(uri, "train", 5, cache_dir=cache).sequence(0)[0].tolist() == stream[:5]

    damaged = read_index(uri).splits["train"].shards[1]
    open_storage(uri).put(damaged.key, b"nonsense")
    with pytest.raises(DataError, match=damaged.key):
        TokenDataset(uri, "train", 5, cache_dir=tmp_path / "other").sequence(2)
