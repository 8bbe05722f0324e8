"""Replicas fit, or the message says what is needed and what is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.serve.capacity import shortfall


@pytest.mark.parametrize(
    ("bundles", "nodes", "message"),
    [
        ([{"CPU": 1}, {"CPU": 1}], [{"CPU": 2}], None),
        ([{"CPU": 1}, {"CPU": 1}], [{"CPU": 1}, {}, {"CPU": 1}], None),
        ([{"CPU": 1}] * 4, [{"CPU": 2}], "needs 4 CPUs, has 2"),
        ([{"CPU": 0.5}] * 3, [{"CPU": 1}], "needs 1.5 CPUs, has 1"),
        ([{"CPU": 1, "GPU": 1}], [{"CPU": 8}], "needs 1 GPUs, has 0"),
        ([{"CPU": 2}], [{"CPU": 1}, {"CPU": 1}], "a node with 2 CPUs free"),
        ([{"CPU": 1}], [], "needs 1 CPUs, has 0"),
        ([], [], None),
    ],
)
def test_shortfall(
    bundles: list[dict[str, float]], nodes: list[dict[str, float]], message: str | None
) -> None:
    found = shortfall(bundles, nodes)
    assert (found is None) == (message is None)
    assert message is None or message in str(found)


_AMOUNTS = st.lists(st.integers(1, 4), max_size=6)


@given(_AMOUNTS, _AMOUNTS)
def test_more_nodes_never_hurt(wanted: list[int], there: list[int]) -> None:
    bundles = [{"CPU": float(cpus)} for cpus in wanted]
    nodes = [{"CPU": float(cpus)} for cpus in there]
    if shortfall(bundles, nodes) is None:
        assert shortfall(bundles, [*nodes, {"CPU": 1.0}]) is None
        assert sum(wanted) <= sum(there)
    assert shortfall(bundles, bundles) is None
