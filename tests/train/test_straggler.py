"""Who holds the others up."""

from __future__ import annotations

import statistics
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.meter import Owner
from ebbtide.train.straggler import RATIO, STEPS, StragglerWatch
from tests.train.conftest import MakeConfig
from tests.train.ranks import Ranks, train

SLOW = """
import time
import torch.distributed as dist
from ebbtide.train.loss import cross_entropy

def slow(output, labels):
    time.sleep(0.5 if dist.get_rank() == 1 else 0.02)
    return cross_entropy(output, labels)
"""


def test_a_rank_is_named_once_after_so_many_slow_steps_on_end() -> None:
    watch = StragglerWatch()
    found = [watch.add([1.0, 1.1, 2.0]) for _ in range(STEPS + 5)]
    assert [index for index, names in enumerate(found) if names] == [STEPS - 1]
    assert found[STEPS - 1] == [(2, 2.0 / 1.1)]


def test_one_good_step_begins_the_count_anew() -> None:
    watch = StragglerWatch()
    for step in range(2 * STEPS - 2):
        assert watch.add([1.0, 1.0, 1.0 if step == STEPS - 1 else 9.0]) == []


@given(st.lists(st.floats(0.9, 0.9 * RATIO), min_size=2, max_size=6))
def test_ranks_about_as_fast_as_the_median_are_never_named(busy_s: list[float]) -> None:
    watch = StragglerWatch()
    assert all(watch.add(busy_s) == [] for _ in range(STEPS + 1))


def test_the_first_step_of_a_generation_names_nobody() -> None:
    assert StragglerWatch().add([0.0, 0.0]) == []


def test_waiting_for_a_slow_rank_is_not_work(
    ranks: Ranks, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "code_of_straggler_test.py").write_text(SLOW)
    config = make_config(steps=9, model={"loss": "code_of_straggler_test:slow"})
    quick, slow, _ = ranks.run(3, train, config, None, str(tmp_path))
    shares = [
        [seconds / statistics.median_low(step.busy_s) for seconds in step.busy_s]
        for step in quick.steps[1:]  # nothing is known of the first
    ]
    typical = [statistics.median(of_rank) for of_rank in zip(*shares, strict=True)]
    assert max(typical[0], typical[2]) < RATIO < typical[1]
    assert [step.busy_s for step in quick.steps] == [step.busy_s for step in slow.steps]
    waited = [sum(step.seconds[Owner.NETWORK_STALL] for step in t.steps) for t in (quick, slow)]
    assert waited[0] > 2 * waited[1]
