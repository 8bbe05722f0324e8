"""Token shards on their way to storage: documents in, full shards out.

Every shard of a split but the last holds exactly ``shard_tokens`` tokens. A shard's key carries its
checksum, so two writers never overwrite each other's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbtide.platform.checksums import sha256
from ebbtide.platform.storage import Storage
from ebbtide.train.dataset import ShardInfo, Split, SplitInfo, pack_shard


class SplitWriter:
    """The token stream of one split; ``counts`` is how often each token has been written."""

    def __init__(
        self, storage: Storage, split: Split, vocab_size: int, eos_id: int, shard_tokens: int
    ) -> None:
        self.counts = np.zeros(vocab_size, np.int64)
        self._storage, self._split = storage, split
        self._tokens = np.empty(shard_tokens, np.uint16 if vocab_size <= 2**16 else np.uint32)
        self._eos = np.array([eos_id], self._tokens.dtype)
        self._filled = 0
        self._list_starts: list[int] = []
        self._documents_before = self._documents = 0
        self._shards: list[ShardInfo] = []

    def add(self, ids: list[int], starts: bool) -> None:
        """Append a piece of a document; ``starts`` ends the document before it."""
        if starts:
            self._end_document()
            if self._filled == len(self._tokens):
                self._flush()
            self._documents += 1
            self._list_starts.append(self._filled)
        self._append(np.array(ids, self._tokens.dtype))

    def finish(self) -> SplitInfo:
        """End the last document and store what is left."""
        self._end_document()
        self._flush()
        return SplitInfo(
            documents=self._documents,
            tokens=sum(shard.tokens for shard in self._shards),
            shards=tuple(self._shards),
        )

    def _end_document(self) -> None:
        if self._documents:
            self._append(self._eos)

    def _append(self, tokens: NDArray[Any]) -> None:
        while len(tokens):
            if self._filled == len(self._tokens):
                self._flush()
                self._list_starts = [0]  # the document goes on
            part = tokens[: len(self._tokens) - self._filled]
            self._tokens[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            tokens = tokens[len(part) :]

    def _flush(self) -> None:
        if not self._filled:
            return
        tokens = self._tokens[: self._filled]
        self.counts += np.bincount(tokens, minlength=len(self.counts))
        data = pack_shard(tokens, np.array(self._list_starts, np.int32))
        digest = sha256(data)
        key = f"{self._split}/{len(self._shards):05d}-{digest[:12]}.arrow"
        self._storage.put(key, data)
        self._shards.append(
            ShardInfo(
                key=key,
                size_bytes=len(data),
                sha256=digest,
                tokens=self._filled,
                documents=self._documents - self._documents_before,
            )
        )
        self._documents_before = self._documents
        self._filled = 0
        self._list_starts = []


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Entropy in nats per token, to 9 places (the last bits differ between processors)."""
    seen = counts[counts > 0].astype(np.float64)
    shares = seen / seen.sum()
    return round(abs(float(-(shares * np.log(shares)).sum())), 9)
