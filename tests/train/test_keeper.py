"""How often copies are made, and that a step does not end before the copy of an earlier one."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebbtide.train.keeper import Keeper, copy_is_due
from ebbtide.train.loop import Training
from ebbtide.train.memory import Slot
from ebbtide.train.peers import Moment
from ebbtide.train.trial import Alone
from tests.train.conftest import MakeConfig
from tests.train.ranks import Ranks


def due_after(step_s: float, cost_s: float, steps: int = 60) -> list[int]:
    """The steps after which copies are made, where sharing one takes ``cost_s``."""
    began_s, found = float("-inf"), []
    for number in range(1, steps + 1):
        begin_s = (number - 1) * step_s
        if copy_is_due(begin_s, step_s, began_s, cost_s):
            began_s = begin_s + step_s
            found.append(number)
    return found


@pytest.mark.parametrize(
    ("step_s", "cost_s", "every"),
    [(0.5, 0.0, 1), (0.5, 0.09, 1), (0.5, 0.15, 2), (0.5, 0.19, 2), (0.1, 0.19, 10)],
)
def test_a_copy_every_kth_step_takes_a_fifth_of_a_processor(
    step_s: float, cost_s: float, every: int
) -> None:
    assert due_after(step_s, cost_s) == list(range(1, 61, every))[: len(due_after(step_s, cost_s))]
    assert len(due_after(step_s, cost_s)) == -(-60 // every)


class SlowMemory:
    """Shares a copy when it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.shared, self.error = threading.Event(), 0, error

    def copy(self, held: Slot | None) -> Any:
        return None

    def share(self, slot: Slot, moment: Moment, group: dist.ProcessGroup) -> None:
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        self.shared += 1


MOMENT = Moment(1, 1, None, None)


def shared_before_the_next_step_ends(config: Any) -> tuple[bool, int]:
    """Whether a step ended while the copy of the step before was not shared; copies shared."""
    training = Training(config, 0, Alone(lambda report: None), torch.device("cpu"), True)
    saver = training.saver
    assert saver is not None
    memory = SlowMemory()
    saver._keeper = Keeper(memory)  # type: ignore[arg-type]  # stands in for PeerMemory
    ended = threading.Event()

    def steps() -> None:
        training.step.run(0)
        saver.keep(MOMENT)
        training.step.run(1)
        ended.set()

    thread = threading.Thread(target=steps)
    thread.start()
    early = ended.wait(1.0)  # it never is, however long one waits
    memory.go.set()
    thread.join(60)
    training.step.loader.close()
    return early, memory.shared


def test_no_step_ends_before_the_copy_of_the_one_before_is_with_the_peers(
    ranks: Ranks, make_config: MakeConfig
) -> None:
    assert ranks.run(1, shared_before_the_next_step_ends, make_config()) == [(False, 1)]


def failing() -> bool:
    """Whether a failure is raised where it matters; nothing is raised where it does not."""
    memory = SlowMemory(RuntimeError("peer gone"))
    memory.go.set()
    keeper = Keeper(memory)  # type: ignore[arg-type]
    keeper.keep(MOMENT, None)
    try:
        keeper.join()
        raised = False
    except RuntimeError:
        raised = True
    keeper.keep(MOMENT, None)
    keeper.rest()
    return raised


def test_a_copy_that_cannot_be_shared_fails_the_step_and_not_the_leaving(ranks: Ranks) -> None:
    assert ranks.run(1, failing) == [True]
