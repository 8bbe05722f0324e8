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

    def span(self, micro_batches: int, rank: int) -> tuple[int, int]:
        """The micro-batches ``[first, stop)`` of a rank; ranks have one more or less."""
        return (
            rank * micro_batches // self.world_size,
            (rank + 1) * micro_batches // self.world_size,
        )

    def share(self, micro_batches: int) -> Iterator[int | None]:
        """This rank's micro-batch of each round, by number; None is a surplus pass."""
        first, stop = self.span(micro_batches, self.rank)
        for number in range(first, first + self.rounds(micro_batches)):
            yield number if number < stop else None
