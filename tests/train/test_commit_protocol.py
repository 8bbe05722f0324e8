"""Saving, committing, removing and being killed between any two storage operations, in any order.

In memory, with a clock that counts operations; every run is checked after every operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.checksums import sha256
from ebbtide.platform.errors import AlreadyExists, NotFound, StorageError
from ebbtide.platform.storage import Listing, ObjectInfo, Storage, Upload, Uploads
from ebbtide.train import manifest
from ebbtide.train.config import CheckpointConfig
from ebbtide.train.manifest import CheckpointManifest, FileEntry
from ebbtide.train.retention import collect

GRACE_S = 40.0


class Killed(BaseException):
    """The process is no more; nothing of it runs on, no handler either."""


@dataclass
class World:
    """What is stored, when, and what is still being uploaded; and when the writer is killed."""

    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    uploads: dict[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    operations_left: int | None = None
    has_effect: bool = True
    refuses: bool = False

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """One operation that changes something. The killing one takes effect, or does not."""
        self.now_s += 1.0
        if self.operations_left is None:
            yield
            return
        if self.operations_left == 0:
            if self.refuses:
                raise StorageError("the server answered SlowDown")
            if self.has_effect:
                yield
            raise Killed
        self.operations_left -= 1
        yield


class Memory:
    """A storage of a world."""

    def __init__(self, world: World, root: str) -> None:
        self._world, self._root = world, root

    @property
    def uri(self) -> str:
        return f"memory://{self._root}"

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if if_absent and f"{self._root}/{key}" in self._world.objects:
            raise AlreadyExists(key)
        self._write(key, data, is_upload=False)

    def put_file(self, key: str, path: Path) -> None:
        self._write(key, path.read_bytes(), is_upload=True)

    def _write(self, key: str, data: bytes, is_upload: bool) -> None:
        world, whole = self._world, f"{self._root}/{key}"
        if is_upload:
            with world.change():
                world.uploads[whole] = world.now_s
        with world.change():
            world.uploads.pop(whole, None)
            world.objects[whole] = (data, world.now_s)

    def upload(self, key: str, data: bytes) -> None:
        """As ``put_file``, of bytes."""
        self._write(key, data, is_upload=True)

    def get(self, key: str) -> bytes:
        try:
            return self._world.objects[f"{self._root}/{key}"][0]
        except KeyError:
            raise NotFound(key) from None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def get_file(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key))

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str = "") -> Listing:
        root = f"{self._root}/"
        return [
            ObjectInfo(key.removeprefix(root), len(data), time_s)
            for key, (data, time_s) in sorted(self._world.objects.items())
            if key.startswith(root + prefix)
        ]

    def delete(self, key: str) -> None:
        folder = f"{self._root}/{key}".rpartition("/")[0]
        if not key.endswith(manifest.MANIFEST):
            assert f"{folder}/{manifest.MANIFEST}" not in self._world.objects  # that goes first
        with self._world.change():
            self._world.objects.pop(f"{self._root}/{key}", None)

    def uploads(self, prefix: str = "") -> Uploads:
        root = f"{self._root}/"
        return [
            Upload(key.removeprefix(root), time_s, key)
            for key, time_s in self._world.uploads.items()
            if key.startswith(root + prefix)
        ]

    def abort(self, upload: Upload) -> None:
        with self._world.change():
            self._world.uploads.pop(upload.id, None)

    def child(self, prefix: str) -> Memory:
        return Memory(self._world, f"{self._root}/{prefix}")


def save(run: Memory, token: str, step: int, ranks: int, keep: CheckpointConfig) -> None:
    """The write path of a checkpoint and what follows it, in the order of the saver."""
    checkpoint = run.child(manifest.checkpoint_key(step, token))
    for rank in range(ranks):
        data = f"{token} {step} {rank}".encode()
        key = f"__{rank}_0.distcp"
        checkpoint.upload(key, data)
        entry = FileEntry(key=key, size_bytes=len(data), sha256=sha256(data))
        manifest.put_part(checkpoint, rank, [entry])
    description = CheckpointManifest(
        run="r",
        step=step,
        time_s=0.0,
        world_size=ranks,
        config_sha256="",
        dataset_sha256="",
        tokens_seen=0,
        validation_loss=float(step % 3) if step % 2 else None,
        fingerprint={},
        files=(),
    )
    manifest.commit(checkpoint, description)
    committed = next(
        i for i in manifest.list_checkpoints(run) if i.name.endswith(token) and i.step == step
    )
    collect(run, committed, keep)


def newest_step(run: Storage) -> int:
    """The newest step, after a look whether it can be loaded and is of one attempt."""
    found = manifest.newest(run)
    if found is None:
        return 0
    assert manifest.verify(run, found).state == "complete"
    checkpoint = run.child(f"checkpoints/{found.name}")
    token = found.name.rpartition("-")[2]
    for entry in manifest.read_manifest(checkpoint).files:
        assert checkpoint.get(entry.key).startswith(f"{token} {found.step} ".encode())
    return found.step


ATTEMPTS = st.lists(
    st.tuples(
        st.integers(1, 3),  # ranks
        st.integers(0, 60),  # operations until it is killed, or refused once
        st.booleans(),  # whether the last one takes effect
        st.booleans(),  # refused, not killed
        st.integers(0, 50),  # seconds until the next attempt
    ),
    min_size=1,
    max_size=5,
)


@given(ATTEMPTS, st.integers(1, 3), st.booleans())
def test_whatever_is_killed_whenever(
    attempts: list[tuple[int, int, bool, bool, int]], keep_last: int, keep_best: bool
) -> None:
    world = World()
    keep = CheckpointConfig(keep_last=keep_last, keep_best=keep_best, grace_s=GRACE_S)
    run, other = Memory(world, "runs/r"), Memory(world, "runs/r2")
    other.upload("checkpoints/step-00000001-aa/half", b"half")
    other.put("checkpoints/step-00000009-bb/rank-0.json", b"[]")
    world.uploads["runs/r2/checkpoints/step-00000001-aa/more"] = 0.0
    others = {key: value for key, value in world.objects.items() if "/r2/" in key}
    told = 0
    for number, (ranks, operations, has_effect, refuses, pause_s) in enumerate(attempts):
        world.operations_left, world.has_effect, world.refuses = operations, has_effect, refuses
        step = newest_step(run)  # it goes on from there
        assert step >= told
        try:
            while True:
                step += 1
                try:
                    save(run, f"{number:02x}", step, ranks, keep)
                    told = step
                except StorageError:
                    world.operations_left = operations  # the run goes on without
                if step > newest_step(run) + 3 or step > 40:
                    break
                assert newest_step(run) >= told
        except Killed:
            pass
        world.operations_left = None
        assert newest_step(run) >= told
        told = newest_step(run)
        world.now_s += pause_s
    world.now_s += GRACE_S
    save(run, "ff", newest_step(run) + 1, 1, keep)
    states = [info.state for info in manifest.list_checkpoints(run)]
    assert set(states) == {"complete"}
    assert len(states) <= keep_last + keep_best
    assert run.uploads() == []
    assert {key: value for key, value in world.objects.items() if "/r2/" in key} == others
    assert len(other.uploads()) == 1
