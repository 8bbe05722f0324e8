"""S3 as it is: busy, slow, cut off, down, or refusing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from ebbtide.platform import s3
from ebbtide.platform.errors import (
    AccessError,
    AlreadyExists,
    EbbtideError,
    StorageError,
    Unreachable,
)
from ebbtide.platform.storage import Storage, open_storage, probe
from tests.faulty_s3 import COMPLETE, FaultyS3, Rule

PARTS, PART_BYTES = 3, 5 * 2**20


@pytest.fixture
def storage(faulty_s3: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """With parts as small as S3 takes them."""
    small = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)
    monkeypatch.setattr(s3, "_TRANSFER", small)
    return open_storage(f"s3://{faulty_s3.bucket}/{tmp_path.name}")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that goes up in three parts."""
    path = tmp_path_factory.mktemp("large") / "large.bin"
    path.write_bytes(os.urandom(PARTS * PART_BYTES - 1000))
    return path


def test_files_go_in_parts_side_by_side(
    storage: Storage, faulty_s3: FaultyS3, large: Path, tmp_path: Path
) -> None:
    # Each part waits half a second; had they waited one after the other, more would be open late.
    faulty_s3.set(Rule("delay", "partNumber=", delay_s=0.5))
    storage.put_file("a", large)
    parts = [request for request in faulty_s3.seen if "partNumber=" in request]
    assert len(parts) == PARTS
    assert faulty_s3.most_at_once == PARTS
    faulty_s3.set(Rule("delay", "^GET ", delay_s=0.5))
    storage.get_file("a", tmp_path / "back")
    assert len([request for request in faulty_s3.seen if request.startswith("GET ")]) == PARTS
    assert faulty_s3.most_at_once == PARTS
    assert (tmp_path / "back").read_bytes() == large.read_bytes()


def test_a_busy_server_is_asked_again_after_growing_pauses(
    storage: Storage, faulty_s3: FaultyS3, large: Path, retry_gaps_s: list[float]
) -> None:
    # Case C5: 30% of PUTs and the first five CompleteMultipartUpload answer 503.
    busy = Rule("status", "^PUT ", share=0.3)
    faulty_s3.set(Rule("status", COMPLETE, times=5), busy)
    for number in range(10):
        storage.put(f"small-{number}", b"x")
    del retry_gaps_s[:]
    busy.share = 0.0
    storage.put_file("large", large)
    assert busy.hits
    assert storage.size("large") == large.stat().st_size
    for number, gap_s in enumerate(retry_gaps_s):
        assert 0 <= gap_s <= 2**number  # drawn from a range that doubles
    assert len(retry_gaps_s) == 5
    assert storage.uploads() == []


def test_a_server_that_stays_busy_is_given_up_and_nothing_is_left_open(
    storage: Storage, faulty_s3: FaultyS3, large: Path, retry_gaps_s: list[float]
) -> None:
    # Case C5: always 503.
    for pattern in ("partNumber=", COMPLETE):
        faulty_s3.set(Rule("status", pattern))
        with pytest.raises(StorageError, match="cannot write large: the server answered SlowDown"):
            storage.put_file("large", large)
        assert len(retry_gaps_s) <= PARTS * s3._MAX_ATTEMPTS
        del retry_gaps_s[:]
        assert storage.uploads() == []
        assert storage.list() == []


@pytest.mark.parametrize("deed", ["reset", "lose", "truncate"])
def test_connections_that_break_are_made_again(
    storage: Storage,
    faulty_s3: FaultyS3,
    large: Path,
    tmp_path: Path,
    retry_gaps_s: list[float],
    deed: str,
) -> None:
    storage.put("small", b"0123456789")
    storage.put_file("large", large)
    pattern = "^GET " if deed == "truncate" else ""
    faulty_s3.set(Rule(deed, pattern, share=0.3))  # type: ignore[arg-type]  # one of them
    for number in range(6):
        storage.put(f"small-{number}", b"x")
        assert storage.get("small") == b"0123456789"
        assert storage.get_range("small", 2, 3) == b"234"
    assert len(storage.list()) == 8
    storage.put_file("again", large)
    storage.get_file("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == large.read_bytes()
    faulty_s3.set()
    assert storage.size("again") == large.stat().st_size


def test_a_completion_whose_answer_is_lost_is_no_failure(
    storage: Storage, faulty_s3: FaultyS3, large: Path, retry_gaps_s: list[float]
) -> None:
    faulty_s3.set(Rule("lose", COMPLETE, times=1))
    storage.put_file("large", large)
    assert storage.size("large") == large.stat().st_size
    assert storage.uploads() == []


def test_a_conditional_put_whose_answer_is_lost_looks_taken(
    storage: Storage, faulty_s3: FaultyS3, retry_gaps_s: list[float]
) -> None:
    # Why whoever makes one looks whether what is there is his own.
    faulty_s3.set(Rule("lose", "^PUT ", times=1))
    with pytest.raises(AlreadyExists):
        storage.put("once", b"mine", if_absent=True)
    assert storage.get("once") == b"mine"


def test_a_server_that_does_not_answer_in_time(
    storage: Storage,
    faulty_s3: FaultyS3,
    retry_gaps_s: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "_READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr(s3, "_clients", {})
    faulty_s3.set(Rule("delay", "^PUT ", times=2, delay_s=1.0))
    storage.put("a", b"x")
    assert len(retry_gaps_s) == 2
    faulty_s3.set(Rule("delay", "^PUT ", delay_s=1.0))
    with pytest.raises(StorageError, match="cannot write b: .*[Tt]imeout"):
        storage.put("b", b"x")


@pytest.mark.parametrize(
    ("pattern", "status", "code", "said"),
    [
        ("^PUT ", 403, "AccessDenied", "cannot write .*: permission denied; allow s3:GetObject"),
        ("^GET ", 403, "AccessDenied", "cannot read .*: permission denied; allow s3:GetObject"),
        ("^DELETE ", 403, "AccessDenied", "cannot delete .*: permission denied; allow s3:Get"),
        ("^PUT ", 404, "NoSuchBucket", "no such bucket; create it or correct the URI"),
        ("^PUT ", 403, "RequestTimeTooSkewed", "clock skew: this machine's clock is not the"),
    ],
)
def test_the_probe_says_plainly_what_is_wrong(
    storage: Storage, faulty_s3: FaultyS3, pattern: str, status: int, code: str, said: str
) -> None:
    faulty_s3.set(Rule("status", pattern, status=status, code=code))
    with pytest.raises(AccessError, match=said) as caught:
        probe(storage)
    assert storage.uri in str(caught.value)
    assert len(faulty_s3.seen) <= 4  # nothing of this passes by itself: it is not tried again


def test_a_server_that_is_down_may_come_back() -> None:
    from botocore.exceptions import EndpointConnectionError

    down = s3.map_error(EndpointConnectionError(endpoint_url="http://x"), "here")
    assert isinstance(down, Unreachable)


def test_every_error_of_the_client_is_one_of_the_tree() -> None:
    import botocore.exceptions

    kinds = [
        kind
        for kind in vars(botocore.exceptions).values()
        if isinstance(kind, type) and issubclass(kind, botocore.exceptions.BotoCoreError)
    ]
    assert len(kinds) > 50
    for kind in kinds:
        assert isinstance(s3.map_error(kind.__new__(kind), "here"), EbbtideError)
    strange = ClientError({"Error": {"Code": "Strange", "Message": "m"}}, "PutObject")
    assert "the server answered Strange" in str(s3.map_error(strange, "here"))
