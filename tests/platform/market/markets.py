"""Small markets for the tests: zones written as text, ``#`` where spot could be had."""

from __future__ import annotations

import numpy as np

from ebbtide.platform.market.policy import Terms
from ebbtide.platform.market.simulator import Window
from ebbtide.platform.market.traces import Trace

TICK_S = 360.0
"""A tenth of an hour."""
ON_DEMAND_USD, SPOT_USD = 3.0, 1.0


def zone(text: str, name: str = "a", nodes: int = 1) -> Trace:
    """``##..#``: nodes, nodes, none, none, nodes."""
    return Trace(name, TICK_S, np.array([nodes * (mark == "#") for mark in text], dtype=np.int64))


def window(*zones: str, nodes: int = 1) -> Window:
    """Zones a, b, ... of a market."""
    traces = tuple(zone(text, chr(97 + index), nodes) for index, text in enumerate(zones))
    return Window(traces, ON_DEMAND_USD, SPOT_USD)


def terms(work: int, deadline: int, restart: int = 1, zones: int = 1, nodes: int = 1) -> Terms:
    """A job in ticks."""
    names = tuple(chr(97 + index) for index in range(zones))
    return Terms(work * TICK_S, deadline * TICK_S, restart * TICK_S, TICK_S, names, nodes)
