"""A generation: the span of a run in which the set of ranks is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """Everything that depends on the world is built from this value; nothing else remembers one.

    ``state_source`` names the committed checkpoint that the generation started from, or is None
    for a fresh start; ``first_step`` is the number of steps finished before it.
    """

    index: int
    rank: int
    world_size: int
    first_step: int
    state_source: str | None

    def rounds(self, micro_batches: int) -> int:
        """Passes that every rank makes per step; the last may be surplus for some ranks."""
        return -(-micro_batches // self.world_size)

    def share(self, micro_batches: int) -> Iterator[int | None]:
        """This rank's micro-batch of each round, by number; None is a surplus pass."""
        for round_index in range(self.rounds(micro_batches)):
            number = round_index * self.world_size + self.rank
            yield number if number < micro_batches else None
