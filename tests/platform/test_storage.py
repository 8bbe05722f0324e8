from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest

from ebbtide.platform.errors import (
    AccessError,
    AlreadyExists,
    ConfigError,
    NotFound,
    StorageError,
)
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import ObjectInfo, Storage, join, open_storage, probe


@pytest.fixture(params=["file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "file":
        return open_storage(f"file://{tmp_path}/store")
    server: LocalS3 = request.getfixturevalue("s3_server")
    return open_storage(f"s3://{server.bucket}/{tmp_path.name}")


def keys(found: list[ObjectInfo]) -> list[str]:
    return [info.key for info in found]


def test_what_is_put_is_got_whole_in_part_and_by_file(storage: Storage, tmp_path: Path) -> None:
    storage.put("a/b.bin", b"0123456789")
    assert storage.get("a/b.bin") == b"0123456789"
    assert storage.get_range("a/b.bin", 2, 3) == b"234"
    assert storage.get_range("a/b.bin", 8, 100) == b"89"
    assert storage.size("a/b.bin") == 10
    storage.get_file("a/b.bin", tmp_path / "deep" / "copy.bin")
    assert (tmp_path / "deep" / "copy.bin").read_bytes() == b"0123456789"


def test_a_large_file_goes_up_and_comes_down_equal(storage: Storage, tmp_path: Path) -> None:
    source = tmp_path / "large.bin"
    source.write_bytes(os.urandom(40 * 2**20))
    storage.put_file("large.bin", source)
    storage.get_file("large.bin", tmp_path / "back.bin")
    assert (tmp_path / "back.bin").read_bytes() == source.read_bytes()


def test_a_listing_is_sorted_and_by_prefix(storage: Storage) -> None:
    for key in ("b/2", "a/1", "b/1", "c"):
        storage.put(key, b"x")
    assert keys(storage.list()) == ["a/1", "b/1", "b/2", "c"]
    assert keys(storage.list("b/")) == ["b/1", "b/2"]
    assert keys(storage.child("b").list()) == ["1", "2"]
    assert keys(storage.child("none").list()) == []


def test_a_deleted_object_is_gone_and_deleting_it_again_is_no_error(storage: Storage) -> None:
    storage.put("a/1", b"x")
    storage.put("a/2", b"x")
    storage.delete("a/1")
    storage.delete("a/1")
    assert keys(storage.list()) == ["a/2"]


def begin_upload(storage: Storage, key: str) -> None:
    """Begin to write an object as a process does that is then killed."""
    if storage.uri.startswith("s3://"):
        bucket, _, prefix = storage.uri.removeprefix("s3://").partition("/")
        boto3.client("s3").create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{key}")
    else:
        target = Path(storage.uri, key)
        target.parent.mkdir(parents=True, exist_ok=True)
        Path(target.parent, ".staged-abc").write_bytes(b"half")


def test_uploads_that_were_begun_are_no_objects_and_can_be_dropped(storage: Storage) -> None:
    storage.put("a/whole", b"x")
    for key in ("a/1", "b/1"):
        begin_upload(storage, key)
    assert keys(storage.list()) == ["a/whole"]
    found = storage.uploads("a/")
    assert [upload.key.rpartition("/")[0] for upload in found] == ["a"]
    assert abs(found[0].begun_s - time.time()) < 600
    storage.abort(found[0])
    storage.abort(found[0])
    assert storage.uploads("a/") == []
    assert len(storage.uploads()) == 1
    assert keys(storage.list()) == ["a/whole"]


def test_what_is_not_there_is_not_found(storage: Storage, tmp_path: Path) -> None:
    reads: list[Callable[[], object]] = [
        lambda: storage.get("none"),
        lambda: storage.get_range("none", 0, 1),
        lambda: storage.size("none"),
        lambda: storage.get_file("none", tmp_path / "none"),
    ]
    for read in reads:
        with pytest.raises(NotFound, match="none"):
            read()
    assert not (tmp_path / "none").exists()


def test_of_sixteen_conditional_puts_one_wins(storage: Storage) -> None:
    def attempt(number: int) -> int | None:
        try:
            storage.put("lock", str(number).encode(), if_absent=True)
        except AlreadyExists:
            return None
        return number

    with ThreadPoolExecutor(16) as pool:
        winners = [number for number in pool.map(attempt, range(16)) if number is not None]
    assert len(winners) == 1
    assert storage.get("lock") == str(winners[0]).encode()


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../up", "a/../../up", "a/"])
def test_a_key_cannot_leave_the_root(storage: Storage, key: str) -> None:
    with pytest.raises(StorageError, match="not an object key"):
        storage.put(key, b"x")


def test_a_probe_leaves_nothing(storage: Storage) -> None:
    probe(storage)
    assert storage.list() == []


def test_a_put_that_dies_leaves_no_object(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from ebbtide.platform import storage\n"
        "storage.os.fsync = lambda handle: os._exit(9)\n"
        "storage.open_storage(sys.argv[1]).put('a', b'x' * 1000)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert ended.returncode == 9
    assert open_storage(str(tmp_path)).list() == []


def test_local_paths_and_file_uris_are_the_same_place(tmp_path: Path) -> None:
    open_storage(str(tmp_path / "with space")).put("a", b"x")
    assert open_storage(f"file://{tmp_path}/with%20space").get("a") == b"x"


@pytest.mark.parametrize(
    "uri",
    [
        "gs://bucket/x",
        "http://host/x",
        "s3:///x",
        "s3:/bucket/x",
        "file://host/x",
        "file://[x",
        "~nobody-here/x",
        "nul\0:",
    ],
)
def test_a_uri_that_cannot_be_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=uri.partition(":")[0].partition("\0")[0]):
        open_storage(uri)


def test_join_puts_one_slash_between() -> None:
    assert join("s3://bucket/", "/a/", "b") == "s3://bucket/a/b"


def test_an_output_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot write a"):
        open_storage(str(tmp_path / "file")).put("a", b"x")


def test_a_bucket_that_is_not_there_is_named(s3_server: LocalS3) -> None:
    with pytest.raises(AccessError, match="s3://nowhere/x.*no such bucket"):
        open_storage("s3://nowhere/x").put("a", b"x")


def test_wrong_keys_are_refused_plainly(
    s3_server: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessError, match="AWS_SECRET_ACCESS_KEY") as caught:
        probe(open_storage(f"s3://{s3_server.bucket}"))
    assert s3_server.secret_key not in str(caught.value)


def test_missing_credentials_are_said_plainly(
    s3_server: LocalS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessError, match="no credentials; set AWS_ACCESS_KEY_ID"):
        probe(open_storage(f"s3://{s3_server.bucket}"))


def test_a_wrong_endpoint_is_said_plainly(
    s3_server: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(AccessError, match="check AWS_ENDPOINT_URL"):
        probe(open_storage(f"s3://{s3_server.bucket}"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    with pytest.raises(AccessError, match="check AWS_ENDPOINT_URL"):
        probe(open_storage(f"s3://{s3_server.bucket}"))


def test_a_profile_that_is_not_there_is_said_plainly(
    s3_server: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(AccessError, match=r"nobody.*; correct or unset AWS_PROFILE"):
        probe(open_storage(f"s3://{s3_server.bucket}"))


def test_a_bucket_that_cannot_be_is_said_plainly(s3_server: LocalS3) -> None:
    with pytest.raises(AccessError, match="s3://no!bucket: .* correct the URI") as caught:
        probe(open_storage("s3://no!bucket"))
    assert "regex" not in str(caught.value)
