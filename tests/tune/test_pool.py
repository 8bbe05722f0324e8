"""Seats on a real cluster whose CPUs others take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from ebbtide.train.ray_connection import connected
from ebbtide.tune.config import PoolConfig
from ebbtide.tune.pool import Pool
from ebbtide.tune.seat import Seat
from tests.tune.sweeps import pool_status, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_cluster")]
ONE = PoolConfig(size=1)


class Others:
    """Who takes all CPUs of every node."""

    def __init__(self) -> None:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU")]
        self.groups = {
            node: placement_group([{"CPU": 1}], bundle_label_selector=[{"ray.io/node-id": node}])
            for node in nodes
        }
        assert all(group.wait(30) for group in self.groups.values())

    def leave(self, node_id: str) -> None:
        remove_placement_group(self.groups.pop(node_id))


@contextmanager
def stuck(others: Others) -> Iterator[tuple[Pool, Seat]]:
    """A pool of one seat that has asked for CPUs on every node, and got none."""
    with Pool(ONE) as pool:
        (seat,) = pool.seats

        def has_asked() -> bool:
            pool.poll()
            return seat.elsewhere is not None

        wait_for(has_asked)
        assert not seat.ready
        yield pool, seat


def test_an_evaluator_is_given_up_only_for_cpus_on_another_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ebbtide.tune.seat._STUCK_S", 0.2)
    with connected():
        with Pool(ONE) as pool:
            pool.wait()
            home = pool.seats[0].node_id
        before = next(each["pid"] for each in pool_status() if each["name"] == "evaluator-0")
        others = Others()
        assert home is not None
        with stuck(others) as (pool, seat):
            others.leave(home)
            pool.wait()
            assert (seat.node_id, seat.elsewhere) == (home, None)
            assert ray.get(seat.actor.status.remote())["pid"] == before
            others.groups[home] = seat.group  # and is still in its way
            seat.group = None
        with stuck(others) as (pool, seat):
            there = next(node for node in others.groups if node != home)
            others.leave(there)
            pool.wait()
            assert (seat.node_id, seat.elsewhere) == (there, None)
