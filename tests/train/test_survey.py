from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.train.documents import Piece
from ebbtide.train.survey import Survey, TextDigest, assign_splits, decide_split, survey

EVERYTHING_BYTES = 2**20
texts = st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=30)
fractions = st.floats(0.001, 0.999)


def pieces(*documents: str) -> list[Piece]:
    return [Piece("x", document.encode(), True) for document in documents]


def split(documents: list[str], fraction: float, seed: int = 0) -> dict[str, list[str]]:
    """The documents of each split."""
    found = survey(pieces(*documents), seed, EVERYTHING_BYTES)
    splits: defaultdict[str, list[str]] = defaultdict(list)
    rule = decide_split(found, fraction)
    for name, piece in assign_splits(pieces(*documents), rule, seed):
        if piece.starts:
            splits[name].append("")
        splits[name][-1] += piece.data.decode()
    return splits


@given(texts, fractions, st.integers(0, 2**63 - 1))
def test_both_splits_get_text_and_nothing_is_lost(
    documents: list[str], fraction: float, seed: int
) -> None:
    splits = split(documents, fraction, seed)
    together = splits["train"] + splits["validation"]
    if len(set(documents)) > 1:
        assert splits["train"] and splits["validation"]
        assert sorted(together) == sorted(documents)
        assert not set(splits["train"]) & set(splits["validation"])  # copies stay together
    else:
        assert "".join(together) == "".join(documents)
        if len("".join(documents).encode()) > 8:
            assert splits["train"] and splits["validation"]


def test_the_share_is_about_what_was_asked_for() -> None:
    splits = split([f"document {number}" for number in range(4000)], 0.1)
    assert 300 < len(splits["validation"]) < 500


def test_a_document_stays_when_others_come() -> None:
    documents = [f"document {number}" for number in range(300)]
    before, after = split(documents[:200], 0.2), split(documents, 0.2)
    assert set(before["validation"]) == set(after["validation"]) & set(documents[:200])


def test_seeds_split_differently() -> None:
    documents = [f"document {number}" for number in range(100)]
    assert split(documents, 0.3, seed=1) != split(documents, 0.3, seed=2)


def test_the_tail_of_a_single_document_is_for_validation() -> None:
    splits = split(["0123456789" * 10], 0.05)
    assert splits == {"train": ["0123456789" * 9 + "01234"], "validation": ["56789"]}


def test_a_document_in_pieces_stays_together() -> None:
    stream = [
        Piece("x", f"{document}-{part}".encode(), part == 0)
        for document in range(50)
        for part in range(3)
    ]
    rule = decide_split(survey(stream, 0, EVERYTHING_BYTES), 0.3)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, piece in assign_splits(stream, rule, 0):
        found[piece.data.decode().partition("-")[0]].add(name)
    assert all(len(names) == 1 for names in found.values())
    assert set.union(*found.values()) == {"train", "validation"}


def test_what_a_survey_counts() -> None:
    stream = [*pieces("one", "twö"), Piece("x", b"more", False)]
    found = survey(stream, 0, EVERYTHING_BYTES)
    assert (found.documents, found.corpus_bytes) == (2, 3 + 4 + 4)
    assert found.sample == (b"one", "twö".encode(), b"more")
    assert survey([], 0, EVERYTHING_BYTES) == Survey(0, 0, TextDigest().hexdigest(), 2**64, -1, ())


def test_the_sample_is_bounded_even_and_repeatable() -> None:
    stream = pieces(*(f"document {number:05d}" for number in range(2000)))
    sample = survey(stream, 0, 14 * 500).sample
    assert sample == survey(stream, 0, 14 * 500).sample != survey(stream, 1, 14 * 500).sample
    assert len(sample) == 500
    numbers = [int(data.split()[1]) for data in sample]
    assert numbers == sorted(numbers)
    assert 150 < sum(number < 1000 for number in numbers) < 350
    assert survey(stream, 0, 0).sample == ()


@pytest.mark.parametrize(
    "other",
    [
        pieces("a", "b", "d"),
        pieces("b", "a", "c"),
        pieces("ab", "c"),
        [*pieces("a", "b"), Piece("x", b"c", False)],
    ],
)
def test_the_digest_sees_text_order_and_bounds(other: list[Piece]) -> None:
    assert survey(other, 0, 0).digest != survey(pieces("a", "b", "c"), 0, 0).digest
