from __future__ import annotations

import filecmp
import gzip
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from ebbtide.platform.errors import AlreadyExists, DataError, EbbtideError, NotFound, StorageError
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import LocalStorage, open_storage
from ebbtide.train import prepare as prepare_module
from ebbtide.train.dataset import (
    TokenDataset,
    index_digest,
    map_shard,
    read_index,
    read_tokenizer_files,
)
from ebbtide.train.prepare import PrepareConfig, PrepareResult, prepare


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.py").write_text(f"def f{number}(x):\n    return x * {number}\n")
    return folder


def run(source: Path, out: Path, **settings: Any) -> PrepareResult:
    return prepare(
        PrepareConfig(sources=(str(source),), out=str(out), **{"vocab_size": 280, **settings})
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def decoded(out: Path, split: Any) -> list[str]:
    """The text of every document of a split."""
    index = read_index(str(out))
    tokenizer = Tokenizer.from_buffer(read_tokenizer_files(str(out))["tokenizer.json"])
    storage = LocalStorage(out)
    shards = [map_shard(storage, shard, out) for shard in index.splits[split].shards]
    stream = np.concatenate(shards)
    ends = np.flatnonzero(stream == index.eos_id)
    assert ends[-1] == len(stream) - 1
    starts = [0, *(ends[:-1] + 1)]
    pairs = zip(starts, ends, strict=True)
    return [tokenizer.decode(stream[a:b].tolist()) for a, b in pairs]


def test_every_document_is_in_one_split_and_comes_back(corpus: Path, tmp_path: Path) -> None:
    result = run(corpus, tmp_path / "out", validation_fraction=0.2, shard_tokens=100)
    train, validation = decoded(tmp_path / "out", "train"), decoded(tmp_path / "out", "validation")
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    assert [text for text in texts if text in set(train)] == train  # in the order of the sources
    assert sorted(train + validation) == sorted(texts)
    splits = result.index.splits
    assert splits["train"].documents == len(train) and len(splits["train"].shards) > 3
    assert splits["validation"].documents == len(validation) > 0
    assert result.index.corpus_bytes == sum(map(len, texts))
    assert result.index == read_index(str(tmp_path / "out"))


def test_unigram_entropy_is_that_of_all_tokens(corpus: Path, tmp_path: Path) -> None:
    index = run(corpus, tmp_path / "out").index
    storage = LocalStorage(tmp_path / "out")
    counts = Counter(
        int(token)
        for split in index.splits.values()
        for shard in split.shards
        for token in map_shard(storage, shard, tmp_path)
    )
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    assert index.unigram_entropy == pytest.approx(entropy, abs=1e-8)


def test_the_same_input_gives_the_same_bytes_wherever_it_lies(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "one")
    corpus.rename(tmp_path / "moved")
    run(tmp_path / "moved", tmp_path / "two")
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one == two
    assert sorted(name.partition("/")[0] for name in one) == [
        "index.json",
        "tokenizer",
        "tokenizer",
        "train",
        "validation",
    ]


def test_the_same_text_as_rows_is_the_same_dataset(corpus: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"body": path.read_text()}) for path in sorted(corpus.iterdir())]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    run(corpus, tmp_path / "one")
    run(path, tmp_path / "two", text_column="body")
    assert index_digest(str(tmp_path / "one")) == index_digest(str(tmp_path / "two"))


def test_prepared_again_is_left_as_it_is(corpus: Path, tmp_path: Path) -> None:
    first = run(corpus, tmp_path / "out")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    second = run(corpus, tmp_path / "out")
    assert (first.already, second.already) == (False, True)
    assert second.index == first.index
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"validation_fraction": 0.3}, {"vocab_size": 270}, {"max_bytes": 500}],
)
def test_other_settings_are_another_dataset(
    corpus: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    run(corpus, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(AlreadyExists, match="dataset of other text or settings"):
        run(corpus, tmp_path / "out", **change)
    assert contents(tmp_path / "out") == before


def test_other_text_is_another_dataset(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out")
    before = contents(tmp_path / "out")
    (corpus / "07.py").write_text("changed")
    with pytest.raises(AlreadyExists, match="nothing was changed"):
        run(corpus, tmp_path / "out")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("name", ["notes.txt", "index.json", "train/00000.arrow"])
def test_an_output_with_other_data_is_refused_untouched(
    corpus: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(AlreadyExists, match="already holds other data"):
        run(corpus, tmp_path / "out")
    assert contents(tmp_path / "out") == {name: b"precious"}


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("put", range(1, 9))
def test_an_interrupted_prepare_is_completed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: int
) -> None:
    """Killed at the n-th write, with other text before: the end is the same as undisturbed."""
    run(corpus, tmp_path / "whole", shard_tokens=400)
    (corpus / "00.py").write_text("as it was before the interruption")
    puts = 0
    original = LocalStorage.put

    def failing(self: LocalStorage, key: str, data: bytes, *, if_absent: bool = False) -> None:
        nonlocal puts
        puts += 1
        if puts == put:
            raise Interrupted
        original(self, key, data, if_absent=if_absent)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(LocalStorage, "put", failing)
        run(corpus, tmp_path / "out", shard_tokens=400)
    with pytest.raises(NotFound):
        read_index(str(tmp_path / "out"))

    (corpus / "00.py").write_text("def f0(x):\n    return x * 0\n")
    run(corpus, tmp_path / "out", shard_tokens=400)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_completing_leaves_foreign_files_alone(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/prepare.incomplete").write_text("")
    (tmp_path / "out/notes.txt").write_text("precious")
    run(corpus, tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "precious"
    assert not (tmp_path / "out/prepare.incomplete").exists()


def test_missing_shards_are_written_again(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out")
    before = contents(tmp_path / "out")
    next((tmp_path / "out/train").iterdir()).unlink()
    assert not run(corpus, tmp_path / "out").already
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("kind", ["train/*", "tokenizer/*/tokenizer.json"])
def test_a_flipped_bit_is_named_and_written_again(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    run(corpus, tmp_path / "out")
    before = contents(tmp_path / "out")
    path = next((tmp_path / "out").glob(kind))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert not run(corpus, tmp_path / "out").already
    assert f"{path.relative_to(tmp_path / 'out')} is damaged" in caplog.text
    assert contents(tmp_path / "out") == before


def race(
    loser: Path, winner: Path, tmp_path: Path, stage: str, **of_winner: Any
) -> tuple[PrepareResult | AlreadyExists, PrepareResult]:
    """Prepare ``winner`` from start to end while ``loser`` is at ``stage``, both into ``out``."""
    results: list[PrepareResult] = []

    def overtake(now: str, done_bytes: int, total_bytes: int | None) -> None:
        if now == stage and not results:
            results.append(run(winner, tmp_path / "out", shard_tokens=400, **of_winner))

    config = PrepareConfig(
        sources=(str(loser),), out=str(tmp_path / "out"), vocab_size=280, shard_tokens=400
    )
    try:
        return prepare(config, overtake), results[0]
    except AlreadyExists as error:
        return error, results[0]


@pytest.mark.parametrize("stage", ["read", "train tokenizer", "encode"])
def test_of_two_at_once_the_loser_changes_nothing(corpus: Path, tmp_path: Path, stage: str) -> None:
    (tmp_path / "other").mkdir()
    for number in range(30):
        (tmp_path / f"other/{number}.txt").write_text(f"quite another text, the {number}th of it")
    lost, won = race(corpus, tmp_path / "other", tmp_path, stage)
    assert isinstance(lost, AlreadyExists) and "other text or settings" in str(lost)
    assert won.index == read_index(str(tmp_path / "out"))
    run(tmp_path / "other", tmp_path / "alone", shard_tokens=400)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.parametrize("stage", ["read", "encode"])
def test_two_at_once_of_the_same_text_both_succeed(
    corpus: Path, tmp_path: Path, stage: str
) -> None:
    lost, won = race(corpus, corpus, tmp_path, stage)
    assert isinstance(lost, PrepareResult) and lost.already and not won.already
    run(corpus, tmp_path / "alone", shard_tokens=400)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_a_probe_of_another_prepare_is_no_data(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.probe-1-ab").write_text("ebbtide")
    assert not run(corpus, tmp_path / "out").already


def test_a_given_tokenizer(corpus: Path, tmp_path: Path) -> None:
    first = run(corpus, tmp_path / "one")
    (given,) = (tmp_path / "one/tokenizer").iterdir()
    second = run(corpus, tmp_path / "two", tokenizer=str(given))
    assert second.index.vocab_size == first.index.vocab_size
    (kept,) = (tmp_path / "two/tokenizer").iterdir()
    assert filecmp.cmp(given / "tokenizer.json", kept / "tokenizer.json", False)
    assert decoded(tmp_path / "one", "train") == decoded(tmp_path / "two", "train")


def test_one_document_gives_its_tail_for_validation(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(path.read_text() for path in sorted(corpus.iterdir()))
    (tmp_path / "one.txt").write_text(text)
    run(tmp_path / "one.txt", tmp_path / "out", validation_fraction=0.25)
    (train,), (validation,) = (decoded(tmp_path / "out", name) for name in ("train", "validation"))
    assert train + validation == text
    assert len(validation) == round(len(text) * 0.25)


def test_the_output_inside_the_source_is_not_read(corpus: Path) -> None:
    run(corpus, corpus / "out")
    assert run(corpus, corpus / "out").already


def test_the_tokenizer_may_learn_from_a_sample(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, tmp_path / "all")
    monkeypatch.setattr(prepare_module, "TOKENIZER_SAMPLE_BYTES", 300)
    for name in ("one", "two"):
        run(corpus, tmp_path / name)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") != contents(tmp_path / "all")
    assert decoded(tmp_path / "one", "train") == decoded(tmp_path / "all", "train")


def test_small_batches_change_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, tmp_path / "one")
    monkeypatch.setattr(prepare_module, "_BATCH_BYTES", 50)
    run(corpus, tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_progress_reaches_the_end(corpus: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    config = PrepareConfig(sources=(str(corpus),), out=str(tmp_path / "out"), vocab_size=280)
    index = prepare(config, lambda *call: calls.append(call)).index
    assert [stage for stage, done, _ in calls if done == 0] == ["read", "train tokenizer", "encode"]
    assert calls[-1] == ("encode", index.corpus_bytes, index.corpus_bytes)


def test_sources_that_change_meanwhile(corpus: Path, tmp_path: Path) -> None:
    def meddling(stage: str, done_bytes: int, total_bytes: int | None) -> None:
        if stage == "train tokenizer":
            (corpus / "20.py").write_text("changed between the passes")

    config = PrepareConfig(sources=(str(corpus),), out=str(tmp_path / "out"))
    with pytest.raises(DataError, match="changed while being read"):
        prepare(config, meddling)
    with pytest.raises(NotFound):
        read_index(str(tmp_path / "out"))


def test_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(DataError, match="holds no file"):
        run(folder, tmp_path / "out")
    (folder / "a.txt").write_text("")
    (folder / "b.bin").write_bytes(b"\0\1")
    with pytest.raises(DataError, match=r"no text in 2 file.*1 binary, 1 empty"):
        run(folder, tmp_path / "out")


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="too little text"):
        run(tmp_path / "a.txt", tmp_path / "out")


def test_an_output_that_cannot_be_written_is_said_before_reading(
    tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / "file").write_text("")
    (corpus / "bad.jsonl").write_text("not read")
    with pytest.raises(StorageError, match="cannot write"):
        run(corpus, tmp_path / "file/out")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": ', r"a\.jsonl:2: is not a line of JSON"),
        ("a.jsonl", '{"body": "a"}', "no column 'text'; the columns are: body"),
        ("a.parquet", "PAR1", r"a\.parquet: is not a Parquet file"),
    ],
)
def test_bad_input_leaves_no_index(
    tmp_path: Path, corpus: Path, name: str, content: str, message: str
) -> None:
    (corpus / name).write_text(content)
    with pytest.raises(EbbtideError, match=message):
        run(corpus, tmp_path / "out")
    assert contents(tmp_path / "out") == {}


def test_from_s3_to_s3(corpus: Path, tmp_path: Path, s3_server: LocalS3) -> None:
    bucket = f"s3://{s3_server.bucket}"
    source = open_storage(f"{bucket}/prepare-in")
    for path in sorted(corpus.iterdir())[:12]:
        source.put(path.name, path.read_bytes())
    for path in sorted(corpus.iterdir())[12:]:
        path.unlink()
    config = PrepareConfig(
        sources=(f"{bucket}/prepare-in",), out=f"{bucket}/prepare-out", vocab_size=280
    )
    assert not prepare(config).already
    assert prepare(config).already
    run(corpus, tmp_path / "out")
    assert index_digest(config.out) == index_digest(str(tmp_path / "out"))
    remote = TokenDataset(config.out, "train", 16, cache_dir=tmp_path / "cache")
    local = TokenDataset(str(tmp_path / "out"), "train", 16)
    for i in range(local.num_sequences):
        assert remote.sequence(i)[1].tolist() == local.sequence(i)[1].tolist()
