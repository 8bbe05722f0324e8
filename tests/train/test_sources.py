from __future__ import annotations

import os
from pathlib import Path

import pytest

from ebbtide.platform.errors import AccessError, ConfigError, DataError
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import open_storage
from ebbtide.train.sources import Filter, SourceFile, find_sources, matches


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in (
        "b.py",
        "a.txt",
        "pkg/z.py",
        "pkg/tests/t.py",
        "pkg/deep/er/y.py",
        "pkg-more/x.py",
        ".git/config",
        ".hidden.py",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


def names(root: Path, files: list[SourceFile]) -> list[str]:
    return [os.path.relpath(file.name, root) for file in files]


@pytest.mark.parametrize(
    ("source", "message"),
    [("", "source is empty"), ("gs://b/x", "scheme 'gs' is not known"), ("http://h/*", "'http'")],
)
def test_a_source_that_cannot_be_one(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_sources([source])


def test_a_directory_in_name_order_without_what_is_hidden(tree: Path) -> None:
    assert names(tree, find_sources([str(tree)])) == [
        "a.txt",
        "b.py",
        "pkg/deep/er/y.py",
        "pkg/tests/t.py",
        "pkg/z.py",
        "pkg-more/x.py",
    ]


def test_globs_and_excludes(tree: Path) -> None:
    wanted = Filter(globs=("**/*.py",), excludes=("tests", "pkg-more/*"))
    assert names(tree, find_sources([str(tree)], wanted)) == [
        "b.py",
        "pkg/deep/er/y.py",
        "pkg/z.py",
    ]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.py", "a.py", True),
        ("*.py", "x/y/a.py", True),
        ("./*.py", "x/a.py", False),
        ("**/*.py", "a.py", True),
        ("**/*.py", "x/y/a.py", True),
        ("x/*.py", "x/a.py", True),
        ("x/*.py", "x/y/a.py", False),
        ("x/**", "x/y/a.py", True),
        ("x/**/a.py", "x/a.py", True),
        ("x/**/a.py", "x/y/z/a.py", True),
        ("tests/", "x/tests", True),
        ("t?st", "test", True),
        ("[ab].py", "b.py", True),
        ("[!ab].py", "b.py", False),
        ("*.PY", "a.py", False),
        ("a+(b).py", "a+(b).py", True),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_glob_patterns_as_sources(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(tree, find_sources([f"{tree}/*.py"])) == ["b.py"]
    assert names(tree, find_sources([f"{tree}/pkg/**/*.py"])) == [
        "pkg/deep/er/y.py",
        "pkg/tests/t.py",
        "pkg/z.py",
    ]
    monkeypatch.chdir(tree)
    assert [file.name for file in find_sources(["*.txt"])] == ["./a.txt"]


def test_a_name_with_wildcard_characters_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("text")
    assert len(find_sources([f"{tmp_path}/a[1].txt"])) == 1


def test_sources_keep_their_order_and_a_file_is_taken_once(tree: Path) -> None:
    files = find_sources([str(tree / "pkg/z.py"), str(tree), f"file://{tree}/b.py"])
    assert names(tree, files)[0] == "pkg/z.py"
    assert len(files) == 6


def test_link_loops_end_and_linked_directories_are_followed(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/o.py").write_text("o")
    (tree / "pkg/loop").symlink_to(tree)
    (tree / "pkg/self").symlink_to("self")
    (tree / "broken").symlink_to("nowhere")
    (tree / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(tree / "pipe")
    found = names(tree, find_sources([str(tree)]))
    assert len(found) == 7
    assert "link/o.py" in found


@pytest.mark.parametrize("source", ["missing", "missing/*.py", "s3", "s3/**/*.md"])
def test_missing_sources(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match="not there|no directory"):
        find_sources([str(tmp_path / source)])


def test_nothing_wanted(tree: Path) -> None:
    with pytest.raises(DataError, match=r"holds no file that is wanted \(globs: \*\.rs"):
        find_sources([str(tree)], Filter(globs=("*.rs",)))
    with pytest.raises(DataError, match="holds no file"):
        find_sources([f"{tree}/*.rs"])


def test_the_output_is_never_a_source(tree: Path) -> None:
    assert len(find_sources([str(tree)], without=tree / "pkg")) == 3


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.txt", "text", None),
        ("a.py", "text", None),
        ("a.JSONL", "jsonl", None),
        ("a.jsonl.gz", "jsonl", "gzip"),
        ("a.ndjson.zst", "jsonl", "zstd"),
        ("a.json", "json", None),
        ("a.txt.gz", "text", "gzip"),
        ("a.gz", "text", "gzip"),
        ("a.parquet", "parquet", None),
        ("Makefile", "text", None),
    ],
)
def test_kinds(name: str, kind: str, compression: str | None) -> None:
    file = SourceFile(f"some/where/{name}")
    assert (file.kind, file.compression) == (kind, compression)


def test_s3(s3_server: LocalS3) -> None:
    uri = f"s3://{s3_server.bucket}/sources"
    storage = open_storage(uri)
    for key in ("a.txt", "b/c.txt", "b/d.md", "b/.git/e.txt", "bc.txt"):
        storage.put(key, key.encode())
    assert [file.key for file in find_sources([f"{uri}/b"])] == ["c.txt", "d.md"]
    assert [file.key for file in find_sources([uri], Filter(globs=("*.txt",)))] == [
        "a.txt",
        "b/c.txt",
        "bc.txt",
    ]
    assert [file.key for file in find_sources([f"{uri}/b/*.md"])] == ["d.md"]
    (file,) = find_sources([f"{uri}/b/c.txt"])
    with file.local() as path:
        assert path.read_bytes() == b"b/c.txt"
    assert not path.exists()
    with pytest.raises(DataError, match="not there"):
        find_sources([f"{uri}/nothing"])


def test_s3_without_credentials(s3_server: LocalS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessError, match="check the credentials"):
        find_sources([f"s3://{s3_server.bucket}/sources"])
