"""States of trials, kept by an evaluator in memory that others on its node can open (Linux).

The memory has no name in any file system: it goes with the evaluator, however that ends.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


class States:
    """Files in memory by name; each is there until it is dropped."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._descriptors)

    def new(self, name: str, content: bytes = b"") -> str:
        """The path of a new file, for every process of this user on this node."""
        self.drop([name])
        descriptor = self._descriptors[name] = os.memfd_create(f"ebbtide-{name}")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        if content:
            Path(path).write_bytes(content)
        return path

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if there is none by this name."""
        descriptor = self._descriptors.get(name)
        return None if descriptor is None else Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def drop(self, names: Collection[str]) -> None:
        """Let go of files; who has one open or mapped keeps it."""
        for name in names:
            descriptor = self._descriptors.pop(name, None)
            if descriptor is not None:
                os.close(descriptor)

    def clear(self) -> None:
        self.drop(list(self._descriptors))
