"""Which checkpoints exist, whatever has crashed on the way; no torch in sight."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ebbtide.platform.checksums import sha256
from ebbtide.platform.errors import AlreadyExists, CheckpointError, StorageError
from ebbtide.platform.storage import LocalStorage, Storage, open_storage
from ebbtide.train import manifest
from ebbtide.train.config import CheckpointConfig
from ebbtide.train.manifest import CheckpointManifest, FileEntry
from ebbtide.train.retention import collect

KEEP_ONE = CheckpointConfig(keep_last=1)


class Crash(Exception):
    """The process died here."""


@dataclass
class Crashing(LocalStorage):
    """A local storage whose process dies before the write or delete number ``after``."""

    root: Path
    after: int

    def __post_init__(self) -> None:
        super().__init__(self.root)

    def _count(self) -> None:
        if self.after == 0:
            raise Crash
        self.after -= 1

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self._count()
        super().put(key, data, if_absent=if_absent)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)


def put_file(checkpoint: Storage, key: str, data: bytes) -> FileEntry:
    checkpoint.put(key, data)
    return FileEntry(key=key, size_bytes=len(data), sha256=sha256(data))


def save(run: Storage, step: int, token: str = "aa", ranks: int = 2) -> None:
    """The write path of a checkpoint, in its order, without tensors."""
    checkpoint = run if isinstance(run, Crashing) else open_storage(run.uri)
    prefix = manifest.checkpoint_key(step, token)

    class At:
        """The checkpoint's storage, counting its writes on the run's."""

        uri = f"{run.uri}/{prefix}"

        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            checkpoint.put(f"{prefix}/{key}", data, if_absent=if_absent)

        def get(self, key: str) -> bytes:
            return checkpoint.get(f"{prefix}/{key}")

    at: Storage = At()  # type: ignore[assignment]  # only what the write path uses
    for rank in range(ranks):
        file = put_file(at, f"__{rank}_0.distcp", b"%d-%d" % (step, rank))
        manifest.put_part(at, rank, [file])
    manifest.commit(at, description(step, ranks))


def description(step: int, ranks: int = 2) -> CheckpointManifest:
    return CheckpointManifest(
        run="run",
        step=step,
        time_s=1.0,
        world_size=ranks,
        config_sha256="",
        dataset_sha256="",
        tokens_seen=0,
        fingerprint={},
        files=(),
    )


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def states(run: Storage) -> dict[int, str]:
    return {info.step: info.state for info in manifest.list_checkpoints(run)}


def the_newest(run: Storage) -> int | None:
    found = manifest.newest(run)
    return None if found is None else found.step


def test_a_crash_at_any_write_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    for after in range(100):
        root = tmp_path / str(after)
        run = open_storage(str(root))
        save(run, 1)
        try:
            save(Crashing(root, after), 2)
        except Crash:
            assert the_newest(run) == 1
            assert states(run).get(2, "incomplete") == "incomplete"
        else:
            assert the_newest(run) == 2
            break
    assert after == 5  # two files, two parts, the manifest: there is no other write


def test_a_crash_at_any_delete_leaves_whole_checkpoints_only(tmp_path: Path) -> None:
    for after in range(100):
        root = tmp_path / str(after)
        run = open_storage(str(root))
        for step in (1, 2, 3):
            save(run, step)
        committed = manifest.newest(run)
        assert committed is not None
        try:
            collect(Crashing(root, after), committed, KEEP_ONE)
        except Crash:
            pass
        else:
            assert states(run) == {3: "complete"}
            break
        for info in manifest.list_checkpoints(run):
            if info.state == "complete":
                assert manifest.verify(run, info) == info
        assert the_newest(run) == 3
        collect(run, committed, KEEP_ONE)  # the next time finishes it
        assert states(run) == {3: "complete"}
    assert after == 10


def test_what_a_killed_attempt_left_goes_after_the_grace_time_and_no_others(
    run: Storage, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    left = []
    for root in (Path(run.uri), other):
        dead = root / "checkpoints" / "step-00000007-dd"
        dead.mkdir(parents=True)
        for name in ("__0_0.distcp", ".staged-x1y2"):  # the second: killed while it wrote
            left.append(dead / name)
            left[-1].write_bytes(b"half")
    save(run, 5)
    committed = manifest.newest(run)
    assert committed is not None
    collect(run, committed, KEEP_ONE)
    assert all(path.exists() for path in left)
    long_ago_s = time.time() - KEEP_ONE.grace_s - 60
    for path in left:
        os.utime(path, (long_ago_s, long_ago_s))
    assert [info.step for info in collect(run, committed, KEEP_ONE)] == [7]
    assert [path.exists() for path in left] == [False, False, True, True]
    assert states(run) == {5: "complete"}


def test_the_newest_is_the_highest_complete_step(run: Storage) -> None:
    # Case C1: 9 and 10 complete, 11 lacks a shard, 12 lacks its manifest, 9 has the newest time.
    for step, token in ((9, "ff"), (10, "aa"), (11, "bb"), (12, "cc")):
        save(run, step, token)
    run.delete("checkpoints/step-00000011-bb/__1_0.distcp")
    run.delete("checkpoints/step-00000012-cc/manifest.json")
    future = time.time() + 3600
    for path in Path(run.uri, "checkpoints", "step-00000009-ff").iterdir():
        os.utime(path, (future, future))
    assert the_newest(run) == 10
    assert states(run) == {12: "incomplete", 11: "incomplete", 10: "complete", 9: "complete"}
    problems = {info.step: info.problem for info in manifest.list_checkpoints(run)}
    assert problems[11] == "__1_0.distcp is missing"
    assert problems[12] == "has no manifest.json"


def test_names_do_not_decide_the_step(run: Storage) -> None:
    save(run, 123_456_789)
    save(run, 99_999_999)
    assert the_newest(run) == 123_456_789


def test_what_is_damaged_is_named(run: Storage) -> None:
    for step in (1, 2, 3):
        save(run, step)
    folder = Path(run.uri, "checkpoints")
    (folder / "step-00000001-aa" / "__0_0.distcp").write_bytes(b"x-0")
    (folder / "step-00000002-aa" / "__0_0.distcp").write_bytes(b"2")
    (folder / "step-00000003-aa" / "manifest.json").write_bytes(b"{")
    found = {info.step: info for info in manifest.list_checkpoints(run)}
    assert [found[step].state for step in (1, 2, 3)] == ["complete", "corrupt", "corrupt"]
    assert found[2].problem == "__0_0.distcp has 1 bytes instead of 3"
    assert "manifest.json is damaged" in str(found[3].problem)
    verified = manifest.verify(run, found[1])
    assert verified.state == "corrupt" and "__0_0.distcp" in str(verified.problem)


def test_every_flipped_byte_of_a_manifest_is_noticed(run: Storage) -> None:
    save(run, 7)
    path = Path(run.uri, manifest.checkpoint_key(7, "aa"), "manifest.json")
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        (info,) = manifest.list_checkpoints(run)
        assert info.state == "corrupt", at
    path.write_bytes(whole)
    older = json.loads(whole)
    del older["checksum"]  # of an earlier version
    path.write_text(json.dumps(older))
    assert the_newest(run) == 7


def test_a_commit_needs_every_part_and_happens_once(run: Storage) -> None:
    save(run, 1)
    another = description(1).model_copy(update={"time_s": 2.0})
    with pytest.raises(AlreadyExists):
        manifest.commit(run.child(manifest.checkpoint_key(1, "aa")), another)
    lone = run.child(manifest.checkpoint_key(2, "aa"))
    manifest.put_part(lone, 0, [put_file(lone, "__0_0.distcp", b"x")])
    with pytest.raises(CheckpointError, match="rank 1 has not stored its part"):
        manifest.commit(lone, description(2))
    assert the_newest(run) == 1


def test_a_commit_whose_answer_was_lost_and_that_is_repeated_is_ours(run: Storage) -> None:
    class Forgetful(LocalStorage):
        """A server that stores, and whose answer does not arrive: the client repeats the put."""

        def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
            super().put(key, data, if_absent=if_absent)
            super().put(key, data, if_absent=if_absent)

    checkpoint = Forgetful(Path(run.uri, manifest.checkpoint_key(1, "aa")))
    manifest.put_part(checkpoint, 0, [put_file(checkpoint, "__0_0.distcp", b"x")])
    manifest.commit(checkpoint, description(1, 1))
    assert the_newest(run) == 1


def test_strangers_among_the_checkpoints_are_ignored(run: Storage) -> None:
    save(run, 1)
    run.put("checkpoints/notes.txt", b"mine")
    run.put("checkpoints/step-old/manifest.json", b"mine")
    assert states(run) == {1: "complete"}
    assert manifest.list_checkpoints(run.child("elsewhere")) == []


def test_storage_errors_are_not_mistaken_for_damage(
    run: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1)

    def refuse(self: LocalStorage, key: str) -> bytes:
        raise StorageError("the network is down")

    monkeypatch.setattr(LocalStorage, "get", refuse)
    with pytest.raises(StorageError, match="network"):
        manifest.list_checkpoints(run)
