"""Which samples a step takes: a pure function of (seed, step), never of rank, world or restart.

The samples of all epochs form one endless line of positions; step ``s`` takes positions
``s * global_sequences`` onwards. Each epoch is a permutation of its own, drawn by sorting the
samples by a counter-based hash (splitmix64), so that it does not change with NumPy's version.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), on every element."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """All sample ids of one epoch, once each, in the order in which it takes them."""
    key = np.zeros(1, np.uint64)
    for word in (seed, epoch):
        key = _mix(key + np.uint64((word * _GOLDEN + 1) & _MASK))
    counters = np.arange(1, num_samples + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return np.argsort(_mix(key + counters), kind="stable").astype(np.int64)


class SampleOrder:
    """The sample ids of every step; its micro-batch m is ``ids[m * micro : (m + 1) * micro]``.

    Raises ValueError for an empty dataset or batch.
    """

    def __init__(self, num_samples: int, global_sequences: int, seed: int) -> None:
        if num_samples < 1 or global_sequences < 1:
            raise ValueError(
                f"an order needs samples and a batch, not {num_samples} and {global_sequences}"
            )
        self.num_samples = num_samples
        self.global_sequences = global_sequences
        self.seed = seed
        self._make_permutation()

    def _make_permutation(self) -> None:
        # A step touches its epoch and at most starts the next: two are worth keeping.
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: permutation(self.num_samples, self.seed, epoch)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_permutation"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_permutation()

    def epoch(self, step: int) -> int:
        """The epoch of the first sample of a 0-based step."""
        return step * self.global_sequences // self.num_samples

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """The ids of a 0-based step, ``int64[global_sequences]``; a step may span epochs."""
        ids = np.empty(self.global_sequences, np.int64)
        filled = 0
        while filled < self.global_sequences:
            epoch, offset = divmod(step * self.global_sequences + filled, self.num_samples)
            part = self._permutation(epoch)[offset : offset + self.global_sequences - filled]
            ids[filled : filled + len(part)] = part
            filled += len(part)
        return ids
