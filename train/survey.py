"""The first pass over a corpus: what it is, how it is split, and a sample for the tokenizer.

The split is a function of each document's own text and the seed, so that a document stays where it
is when others come or go, and copies of one never stand on both sides. Memory is bounded by the
sample, which is drawn evenly and does not depend on how the text arrives.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ebbtide.train.dataset import Split
from ebbtide.train.documents import Piece

_HASH_RANGE = 2**64
_LONGEST_CHARACTER = 4  # bytes of UTF-8; a cut here leaves text before it


class TextDigest:
    """SHA-256 of a stream of documents and of where each begins."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, piece: Piece) -> None:
        """The next piece of the stream."""
        self._hash.update(bytes([piece.starts]) + len(piece.data).to_bytes(8, "little"))
        self._hash.update(piece.data)

    def hexdigest(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()


@dataclass(frozen=True)
class Survey:
    """A corpus at a glance; ``lowest`` and ``highest`` are those of the documents' split hashes."""

    documents: int
    corpus_bytes: int
    digest: str
    lowest: int
    highest: int
    sample: tuple[bytes, ...]


def survey(pieces: Iterable[Piece], seed: int, sample_bytes: int) -> Survey:
    """Read all pieces once; keep at most ``sample_bytes`` of them as the sample, in their order."""
    documents = corpus_bytes = 0
    lowest, highest = _HASH_RANGE, -1
    digest = TextDigest()
    kept: list[tuple[int, int, bytes]] = []  # a heap: the highest sample hash on top
    kept_bytes = 0
    for number, piece in enumerate(pieces):
        digest.add(piece)
        corpus_bytes += len(piece.data)
        if piece.starts:
            documents += 1
            drawn = _split_hash(piece, seed)
            lowest, highest = min(lowest, drawn), max(highest, drawn)
        heapq.heappush(kept, (-_hash(piece.data, seed, b"sample"), number, piece.data))
        kept_bytes += len(piece.data)
        while kept_bytes > sample_bytes:
            kept_bytes -= len(heapq.heappop(kept)[2])
    sample = tuple(data for _, data in sorted((number, data) for _, number, data in kept))
    return Survey(documents, corpus_bytes, digest.hexdigest(), lowest, highest, sample)


def _hash(data: bytes, seed: int, purpose: bytes) -> int:
    drawn = hashlib.blake2b(data, digest_size=8, key=str(seed).encode(), person=purpose)
    return int.from_bytes(drawn.digest(), "little")


def _split_hash(piece: Piece, seed: int) -> int:
    return _hash(piece.data, seed, b"split")


@dataclass(frozen=True)
class SplitRule:
    """Documents whose hash is below ``threshold`` are for validation.

    With ``cut_bytes`` the text itself is cut there instead: all up to it is for training.
    """

    threshold: int
    cut_bytes: int | None = None


def decide_split(surveyed: Survey, validation_fraction: float) -> SplitRule:
    """A rule under which both splits get text.

    If chance would leave a split empty, the document nearest to it moves there. If there is only
    one document (or copies of one), the tail of the text becomes the validation split.
    """
    if surveyed.lowest == surveyed.highest:
        tail = max(1, round(surveyed.corpus_bytes * validation_fraction))
        return SplitRule(0, cut_bytes=max(surveyed.corpus_bytes - tail, _LONGEST_CHARACTER))
    threshold = int(validation_fraction * _HASH_RANGE)
    return SplitRule(min(max(threshold, surveyed.lowest + 1), surveyed.highest))


def assign_splits(
    pieces: Iterable[Piece], rule: SplitRule, seed: int
) -> Iterator[tuple[Split, Piece]]:
    """Every piece with its split; a document's pieces stay together unless the text is cut."""
    if rule.cut_bytes is None:
        split: Split = "train"
        for piece in pieces:
            if piece.starts:
                split = "validation" if _split_hash(piece, seed) < rule.threshold else "train"
            yield split, piece
        return
    room, cut = rule.cut_bytes, False
    for piece in pieces:
        head, tail = piece.split_at(room)
        room -= len(head.data)
        if head.data:
            yield "train", head
        if tail.data:
            yield "validation", Piece(tail.where, tail.data, piece.starts or not cut)
            room, cut = 0, True
