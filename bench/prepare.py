"""How fast text becomes token shards, against the plain loop that one would write by hand.

``python -m bench.prepare --json`` takes the Python standard library's source as it is installed,
makes one tokenizer of it, and encodes it with that in alternating rounds by ``prepare`` and by a
loop in one process over tokenizers and pyarrow. It prints one line of JSON last:

- ``prepare_mb_per_s``, ``plain_mb_per_s``: megabytes of text a second, median of the rounds.
  ``prepare`` also surveys the text, splits it, checks it against change, and syncs what it writes.
- ``ratio_vs_plain``: median over the rounds of plain time over ``prepare`` time.
- ``train_and_prepare_s``: the whole command once, its tokenizer of 4,096 tokens trained.
- ``again_s``: the same command when the dataset is there already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer

from ebbtide.train.dataset import DatasetIndex
from ebbtide.train.documents import Skips, read_documents
from ebbtide.train.prepare import PrepareConfig, prepare
from ebbtide.train.sources import Filter, find_sources

EXCLUDES = ("site-packages", "test", "tests")


def copy_corpus(folder: Path, max_bytes: int | None) -> list[Path]:
    """The standard library's sources as plain files ``00000.py``, ..."""
    folder.mkdir()
    stdlib = sysconfig.get_path("stdlib")
    files = find_sources([stdlib], Filter(globs=("*.py",), excludes=EXCLUDES))
    paths = []
    for number, piece in enumerate(read_documents(files, "text", Skips(quiet=True), max_bytes)):
        paths.append(folder / f"{number:05d}.py")
        paths[-1].write_bytes(piece.data)
    return paths


def plain(paths: list[Path], tokenizer: Path, eos_id: int, out: Path) -> int:
    """Read, encode, append, write: the number of tokens."""
    encoder = Tokenizer.from_file(str(tokenizer))
    documents = []
    for path in paths:
        ids = encoder.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids
        documents.append([*ids, eos_id])
    table = pa.table({"tokens": pa.array(documents, pa.list_(pa.uint16()))})
    with pa.OSFile(str(out), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return sum(map(len, documents))


def measure(folder: Path, rounds: int, max_bytes: int | None) -> dict[str, float]:
    """All figures; ``folder`` takes corpus and outputs."""
    paths = copy_corpus(folder / "corpus", max_bytes)
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        seconds[what].append(time.perf_counter() - start_s)

    def run(name: str, tokenizer: str | None = None) -> DatasetIndex:
        sources, out = (str(folder / "corpus"),), str(folder / name)
        return prepare(PrepareConfig(sources=sources, out=out, tokenizer=tokenizer)).index

    with timed("first"):
        index = run("first")
    with timed("again"):
        run("first")
    (tokenizer,) = (folder / "first" / "tokenizer").glob("*/tokenizer.json")
    for number in range(rounds):
        for what in ("prepare", "plain") if number % 2 else ("plain", "prepare"):
            with timed(what):
                if what == "prepare":
                    run(f"round-{number}", str(tokenizer))
                else:
                    plain(paths, tokenizer, index.eos_id, folder / "plain.arrow")
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["prepare"], strict=True)]
    megabytes = index.corpus_bytes / 1e6
    return {
        "corpus_mb": megabytes,
        "tokens": sum(split.tokens for split in index.splits.values()),
        "prepare_mb_per_s": megabytes / statistics.median(seconds["prepare"]),
        "plain_mb_per_s": megabytes / statistics.median(seconds["plain"]),
        "ratio_vs_plain": statistics.median(ratios),
        "train_and_prepare_s": seconds["first"][0],
        "again_s": seconds["again"][0],
    }


def main() -> None:
    """Run the benchmark; ``--short`` for a quick look."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    parser.add_argument("--short", action="store_true", help="3 MB of text, one round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder:
        short = arguments.short
        figures = measure(Path(folder), 1 if short else 3, 3_000_000 if short else None)
    for name, value in figures.items():
        print(f"{name:24} {value:14.3f}")
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
