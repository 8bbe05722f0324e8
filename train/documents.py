"""Text out of files: a stream of documents in pieces of bounded size.

A document is a text file, a row of JSON lines or a row of Parquet. Memory stays bounded by the
piece, except that a row is read whole. A text file that is binary or not UTF-8, and a row whose
text is not Unicode, is skipped as a whole and counted; what is damaged is an error with its place.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, cast

from ebbtide.platform.errors import DataError
from ebbtide.train.sources import Compression, SourceFile

logger = logging.getLogger(__name__)

PIECE_BYTES = 2**20
_PROBE_BYTES = 8192
_WARNINGS_PER_REASON = 5
_PARQUET_ROWS = 256


@dataclass(frozen=True, slots=True)
class Piece:
    """A document, or a part of one, as UTF-8; ``starts`` marks a document's first piece."""

    where: str
    data: bytes
    starts: bool

    def split_at(self, num_bytes: int) -> tuple[Piece, Piece]:
        """Two pieces; the first has as many whole characters as fit ``num_bytes``."""
        cut = _between_characters(self.data, num_bytes)
        return (
            Piece(self.where, self.data[:cut], self.starts),
            Piece(self.where, self.data[cut:], False),
        )


@dataclass
class Skips:
    """What was passed over and why; said in the log unless ``quiet``.

    With ``strict`` the first file or row that is not text is a DataError instead.
    """

    strict: bool = False
    quiet: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, reason: Literal["binary", "not_utf8", "empty"], where: str) -> None:
        """Count one file or row; the first few of each reason are logged by name."""
        said = reason.replace("not_utf8", "not valid UTF-8")
        if self.strict and reason != "empty":
            raise DataError(f"{where}: is {said}; exclude it, or leave out --strict")
        if not self.quiet and reason != "empty":
            if self.counts[reason] < _WARNINGS_PER_REASON:
                logger.warning("%s: is %s: skipped", where, said)
            elif self.counts[reason] == _WARNINGS_PER_REASON:
                logger.warning("more files or rows are %s: skipped and counted", said)
        self.counts[reason] += 1


def read_documents(
    files: Iterable[SourceFile], text_column: str, skips: Skips, max_bytes: int | None = None
) -> Iterator[Piece]:
    """The documents of all files in order, up to ``max_bytes`` of text (the last one is cut there).

    Raises DataError for a damaged file, a malformed line (``file:line``) or a missing column.
    """
    left = max_bytes
    for file in files:
        with file.local() as path:
            for piece in _read(file, path, text_column, skips):
                if left is not None and len(piece.data) >= left:
                    last, _ = piece.split_at(left)
                    if last.data:
                        yield last
                    return
                if left is not None:
                    left -= len(piece.data)
                yield piece


def _read(file: SourceFile, path: Path, text_column: str, skips: Skips) -> Iterator[Piece]:
    try:
        kind = file.kind
        if kind == "json":
            kind = "jsonl" if _holds_json_lines(path, file.compression) else "text"
        if kind == "parquet":
            yield from _parquet(file.name, path, text_column, skips)
        elif kind == "jsonl":
            with _open(path, file.compression) as lines:
                yield from _json_lines(file.name, lines, text_column, skips)
        else:
            yield from _text(file, path, skips)
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read: {error.strerror or error}") from error


def _open(path: Path, compression: Compression | None) -> BinaryIO:
    """A stream of the file's content; one that is cut short raises OSError at its end."""
    import pyarrow as pa

    if compression is None:
        return path.open("rb")
    stream = pa.input_stream(str(path), compression=compression)
    return io.BufferedReader(cast(io.RawIOBase, stream), PIECE_BYTES)


def _between_characters(data: bytes, at_most: int) -> int:
    """The last place not after ``at_most`` at which UTF-8 may be cut."""
    cut = min(at_most, len(data))
    while 0 < cut < len(data) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _pieces(where: str, stream: BinaryIO) -> Iterator[Piece]:
    """One document, cut after an end of line where there is one in reach."""
    starts, rest = True, b""
    while chunk := stream.read(PIECE_BYTES):
        rest += chunk
        while len(rest) > PIECE_BYTES:
            cut = rest.rfind(b"\n", 0, PIECE_BYTES) + 1 or _between_characters(rest, PIECE_BYTES)
            yield Piece(where, rest[:cut], starts)
            starts, rest = False, rest[cut:]
    if rest:
        yield Piece(where, rest, starts)


def _text(file: SourceFile, path: Path, skips: Skips) -> Iterator[Piece]:
    with _open(path, file.compression) as stream:
        start = stream.read(PIECE_BYTES)
        if b"\0" in start[:_PROBE_BYTES]:
            skips.add("binary", file.name)
            return
        try:
            decoder = codecs.getincrementaldecoder("utf-8")()
            blank = not decoder.decode(start).strip("\ufeff \t\r\n")
            is_short = True
            while chunk := stream.read(PIECE_BYTES):
                decoder.decode(chunk)
                is_short = False
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            skips.add("not_utf8", file.name)
            return
    if not is_short:
        with _open(path, file.compression) as stream:  # again, now that it is known to be text
            if not start.startswith(codecs.BOM_UTF8) or stream.read(len(codecs.BOM_UTF8)):
                yield from _pieces(file.name, stream)
    elif blank:
        skips.add("empty", file.name)
    else:
        yield Piece(file.name, start.removeprefix(codecs.BOM_UTF8), True)


def _row(where: str, data: bytes) -> Iterator[Piece]:
    if len(data) <= PIECE_BYTES:
        yield Piece(where, data, True)
    else:
        yield from _pieces(where, io.BytesIO(data))


def _holds_json_lines(path: Path, compression: Compression | None) -> bool:
    """Whether the first line that is not blank is a JSON object (else the file is plain text)."""
    with _open(path, compression) as stream:
        for line in stream:
            if line.strip():
                try:
                    return isinstance(json.loads(line), dict)
                except (ValueError, RecursionError):
                    return False
    return False


def _json_lines(where: str, lines: BinaryIO, text_column: str, skips: Skips) -> Iterator[Piece]:
    for number, line in enumerate(lines, 1):
        place = f"{where}:{number}"
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: is not a line of JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{place}: is not a JSON object, but {type(row).__name__}")
        if text_column not in row:
            raise DataError(_no_column(place, text_column, row))
        text = row[text_column]
        if text is not None and not isinstance(text, str):
            raise DataError(f"{place}: {text_column!r} is not text, but {type(text).__name__}")
        if not text or not text.strip():
            skips.add("empty", place)
            continue
        try:
            data = text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            skips.add("not_utf8", place)
        else:
            yield from _row(place, data)


def _parquet(where: str, path: Path, text_column: str, skips: Skips) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if text_column not in schema.names:
                raise DataError(_no_column(where, text_column, schema.names))
            found = schema.field(text_column).type
            plain = found.value_type if isinstance(found, pa.DictionaryType) else found
            if plain not in (pa.string(), pa.large_string(), pa.string_view()):
                raise DataError(f"{where}: column {text_column!r} is not text, but {found}")
            number = 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_column]):
                for data in batch.column(0).cast(plain).cast(pa.large_binary()).to_pylist():
                    number += 1
                    yield from _parquet_row(f"{where}: row {number}", data or b"", skips)
    except pa.ArrowException as error:
        raise DataError(f"{where}: is not a Parquet file, or is damaged: {error}") from error


def _parquet_row(where: str, data: bytes, skips: Skips) -> Iterator[Piece]:
    try:
        blank = not data.decode().strip()
    except UnicodeDecodeError:
        skips.add("not_utf8", where)
        return
    if blank:
        skips.add("empty", where)
    else:
        yield from _row(where, data)


def _no_column(where: str, text_column: str, columns: Iterable[str]) -> str:
    known = ", ".join(sorted(columns)) or "none"
    return f"{where}: no column {text_column!r}; the columns are: {known} (choose by --text-column)"
