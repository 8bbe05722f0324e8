from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.platform.storage import LocalStorage
from ebbtide.train.dataset import map_shard
from ebbtide.train.token_writer import SplitWriter, unigram_entropy

EOS = 0
documents_of_pieces = st.lists(
    st.lists(st.lists(st.integers(1, 9), max_size=7), min_size=1, max_size=3), max_size=6
)


@settings(max_examples=25, deadline=None)
@given(documents_of_pieces, st.integers(1, 8))
def test_shards_are_full_and_hold_every_token(
    documents: list[list[list[int]]], shard_tokens: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(Path(folder))
        writer = SplitWriter(storage, "train", 10, EOS, shard_tokens)
        for pieces in documents:
            for number, piece in enumerate(pieces):
                writer.add(piece, starts=number == 0)
        info = writer.finish()
        stream = [t for pieces in documents for t in (*(t for p in pieces for t in p), EOS)]
        shards = [map_shard(storage, shard, Path(folder)).tolist() for shard in info.shards]
    assert [token for shard in shards for token in shard] == stream
    assert all(len(shard) == shard_tokens for shard in shards[:-1])
    assert info.tokens == len(stream)
    assert info.documents == len(documents) == sum(shard.documents for shard in info.shards)
    assert writer.counts.tolist() == np.bincount(np.array(stream, int), minlength=10).tolist()


def test_a_list_per_document_with_the_one_that_crosses_going_on(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    writer = SplitWriter(storage, "validation", 10, EOS, shard_tokens=5)
    for document in ([1, 2], [3, 4, 5, 6], [7, 8, 9]):
        writer.add(document, starts=True)
    info = writer.finish()
    tables = [pa.ipc.open_file(storage.get(shard.key)).read_all() for shard in info.shards]
    assert [table["tokens"].to_pylist() for table in tables] == [
        [[1, 2, 0], [3, 4]],
        [[5, 6, 0], [7, 8]],
        [[9, 0]],
    ]
    assert [shard.documents for shard in info.shards] == [2, 1, 0]
    assert [shard.key[:17] for shard in info.shards][0] == "validation/00000-"


def test_entropy() -> None:
    assert unigram_entropy(np.array([5, 0, 5])) == pytest.approx(math.log(2))
    assert unigram_entropy(np.full(4096, 3)) == pytest.approx(math.log(4096))
    assert str(unigram_entropy(np.array([0, 7]))) == "0.0"
