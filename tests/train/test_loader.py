"""A rank's share of the micro-batches, and reading ahead."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ebbtide.platform.errors import DataError
from ebbtide.train.generation import Generation
from ebbtide.train.loader import StepLoader, share_out
from ebbtide.train.order import SampleOrder


class Counted:
    """Sequence i consists of the number i; one of them cannot be read."""

    num_sequences = 12

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.read: list[int] = []

    def sequence(self, i: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if i == self.broken:
            raise DataError(f"sequence {i} is damaged")
        self.read.append(i)
        return np.full(4, i), np.full(4, i)


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_micro_batch_has_one_rank_and_all_ranks_the_same_passes(
    world_size: int, micro_batches: int
) -> None:
    numbers = [[n] for n in range(micro_batches)]
    shares = [
        share_out(Counted(), numbers, Generation(0, rank, world_size, 0, None))
        for rank in range(world_size)
    ]
    assert len({len(passes) for passes in shares}) == 1
    owned = [one for passes in shares for one in passes if one.number is not None]
    assert sorted(one.number or 0 for one in owned) == list(range(micro_batches))
    assert all(one.inputs.tolist() == [[one.number] * 4] for one in owned)
    surplus = [one for passes in shares for one in passes if one.number is None]
    assert all(one.inputs.shape == (1, 4) for one in surplus)


def test_the_next_step_is_read_ahead_and_no_step_beyond_the_last() -> None:
    dataset, order = Counted(), SampleOrder(12, 4, seed=0)
    loader = StepLoader(dataset, order, 2, Generation(0, 0, 1, 0, None), steps=2)
    for step in (0, 1):
        passes = loader.take(step)
        taken = [int(row[0]) for one in passes for row in one.inputs]
        assert taken == order.sample_ids(step).tolist()
    loader.close()
    assert dataset.read == [*order.sample_ids(0), *order.sample_ids(1)]


def test_what_cannot_be_read_is_said_when_its_step_comes() -> None:
    order = SampleOrder(12, 4, seed=0)
    broken = int(order.sample_ids(1)[2])
    loader = StepLoader(Counted(broken), order, 2, Generation(0, 0, 1, 0, None), steps=3)
    loader.take(0)
    with pytest.raises(DataError, match=f"sequence {broken} is damaged"):
        loader.take(1)
    loader.close()
