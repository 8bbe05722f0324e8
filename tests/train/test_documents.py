from __future__ import annotations

import gzip
import io
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.errors import DataError
from ebbtide.train import documents
from ebbtide.train.documents import Piece, Skips, read_documents
from ebbtide.train.sources import SourceFile


def read(
    *paths: Path, column: str = "text", max_bytes: int | None = None, skips: Skips | None = None
) -> list[str]:
    """The documents, whole."""
    files = [SourceFile(str(path)) for path in paths]
    whole: list[bytes] = []
    for piece in read_documents(files, column, skips or Skips(), max_bytes):
        if piece.starts:
            whole.append(b"")
        whole[-1] += piece.data
    return [data.decode() for data in whole]


def rows(*texts: Any) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": text}).encode() + b"\n" for text in texts)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_text_keeps_every_character(tmp_path: Path) -> None:
    text = "a\r\nb\n\n  \u00e9\u9f9c\U0001fae0\n"
    plain = write(tmp_path / "a.txt", text.encode())
    marked = write(tmp_path / "b.txt", b"\xef\xbb\xbf" + text.encode())
    assert read(plain, marked) == [text, text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, rows("one", "two") + b"\n \n" + rows("three").strip())
    assert read(path) == ["one", "two", "three"]


@pytest.mark.parametrize("content", ['{\n "a": 1\n}\n', "[1, 2]\n", "not json\n"])
def test_a_json_file_that_is_not_lines_of_objects_is_text(tmp_path: Path, content: str) -> None:
    assert read(write(tmp_path / "a.json", content.encode())) == [content]


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_compressed(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    parts = compress(rows("one")) + compress(rows("two"))  # as made by `cat a.gz b.gz`
    lines = write(tmp_path / f"a.jsonl.{suffix}", parts)
    text = write(tmp_path / f"b.txt.{suffix}", compress(b"three"))
    assert read(lines, text) == ["one", "two", "three"]


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_compressed_but_damaged(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    data = compress(rows(*(f"{number} is text" for number in range(5000))))
    cut = write(tmp_path / f"cut.jsonl.{suffix}", data[: len(data) // 2])
    wrong = write(tmp_path / f"wrong.txt.{suffix}", b"not compressed at all")
    for path in (cut, wrong):
        with pytest.raises(DataError, match=path.name):
            read(path)


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_parquet(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", id=[1, 2, 3], body=["one", None, "three"])
    large = parquet(tmp_path / "b.parquet", body=pa.array(["four"], pa.large_string()))
    skips = Skips()
    assert read(path, large, column="body", skips=skips) == ["one", "three", "four"]
    assert skips.counts == Counter(empty=1)


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_every_kind_of_text_column(tmp_path: Path, kind: pa.DataType) -> None:
    texts = pa.array(["one", None, "\u00e9", "one"], pa.string())
    path = parquet(tmp_path / "a.parquet", text=texts.cast(kind))
    assert read(path) == ["one", "\u00e9", "one"]


def test_a_dictionary_of_numbers_is_not_text(tmp_path: Path) -> None:
    numbers = pa.array([1, 2]).dictionary_encode()
    with pytest.raises(DataError, match="not text, but"):
        read(parquet(tmp_path / "a.parquet", text=numbers))


def test_an_unknown_column_names_those_there_are(tmp_path: Path) -> None:
    for path in (
        parquet(tmp_path / "a.parquet", body=["x"], title=["y"]),
        write(tmp_path / "a.jsonl", b'{"title": "y", "body": "x"}\n'),
    ):
        with pytest.raises(DataError, match="no column 'text'; the columns are: body, title"):
            read(path)


def test_a_column_that_is_not_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not text, but int64"):
        read(parquet(tmp_path / "a.parquet", text=[1]))
    with pytest.raises(DataError, match=r"a\.jsonl:1: 'text' is not text, but int"):
        read(write(tmp_path / "a.jsonl", rows(1)))


def test_what_is_not_parquet(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet: is not a Parquet file"):
        read(write(tmp_path / "a.parquet", b"PAR1 no PAR1"))


@pytest.mark.parametrize(
    "line", [b"{", b'{"text": "a"} x', b"\xff\xfe", b"[1]", b"3", b"[" * 10**5]
)
def test_a_malformed_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path / "a.jsonl", rows("one", "two") + line + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl:3: is not a"):
        read(path)


def test_what_is_not_text_is_skipped_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ebbtide"), "propagate", True)
    paths = [
        write(tmp_path / "a.bin", b"\x7fELF\0\0"),
        write(tmp_path / "b.txt", "latin: é".encode("latin-1")),
        write(tmp_path / "c.txt", b" \n\n"),
        write(tmp_path / "d.txt", b""),
        write(tmp_path / "e.jsonl", b'{"text": "\\ud800"}\n{"text": null}\n{"text": ""}\n'),
        write(tmp_path / "f.txt", b"text"),
    ]
    skips = Skips()
    assert read(*paths, skips=skips) == ["text"]
    assert skips.counts == Counter(binary=1, not_utf8=2, empty=4)
    assert "a.bin: is binary: skipped" in caplog.text
    assert "e.jsonl:1: is not valid UTF-8: skipped" in caplog.text


@pytest.mark.parametrize("data", [b"a\0b", b"\xff"])
def test_strict_refuses_what_is_not_text(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.txt: is .*--strict"):
        read(write(tmp_path / "a.txt", data), skips=Skips(strict=True))


def test_many_skips_are_said_a_few_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ebbtide"), "propagate", True)
    skips = Skips()
    read(*(write(tmp_path / f"{i}.bin", b"\0") for i in range(50)), skips=skips)
    assert skips.counts["binary"] == 50
    assert len({record.message for record in caplog.records}) < 10


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: cannot be read"):
        read(tmp_path / "gone.txt")


@pytest.mark.parametrize("suffix", ["txt", "txt.gz", "jsonl"])
def test_long_documents_come_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    text = "".join(f"line {number} é\n" for number in range(100)) + "龜" * 100
    data = rows(text) if suffix == "jsonl" else text.encode()
    path = write(tmp_path / f"a.{suffix}", gzip.compress(data) if suffix == "txt.gz" else data)
    pieces = list(read_documents([SourceFile(str(path))], "text", Skips()))
    assert b"".join(piece.data for piece in pieces).decode() == text
    assert [piece.starts for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert all(len(piece.data) <= 64 for piece in pieces)
    for piece in pieces:
        piece.data.decode()
    assert pieces[0].data.endswith(b"\n")


def test_a_long_file_that_turns_out_not_to_be_text_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 64)
    skips = Skips()
    assert read(write(tmp_path / "a.txt", b"text\n" * 100 + b"\xff"), skips=skips) == []
    assert skips.counts == Counter(not_utf8=1)


def test_max_bytes_cuts_the_last_document_between_characters(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.txt", b"12345"), write(tmp_path / "b.txt", "aéé".encode())
    assert read(first, second, max_bytes=7) == ["12345", "a"]
    assert read(first, second, max_bytes=8) == ["12345", "aé"]
    assert read(first, second, max_bytes=5) == ["12345"]
    assert read(first, second, max_bytes=100) == ["12345", "aéé"]


@given(st.text(), st.integers(0, 50))
def test_splitting_a_piece_keeps_characters_whole(text: str, num_bytes: int) -> None:
    head, tail = Piece("x", text.encode(), True).split_at(num_bytes)
    assert head.data.decode() + tail.data.decode() == text
    assert num_bytes - 4 < len(head.data) <= num_bytes or not tail.data
    assert head.starts and not tail.starts


@given(st.text(max_size=400), st.integers(4, 40))
def test_pieces_are_the_text(text: str, piece_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", piece_bytes)
        pieces = list(documents._pieces("x", io.BytesIO(text.encode())))
    assert "".join(piece.data.decode() for piece in pieces) == text
