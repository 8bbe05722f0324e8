"""Whether a training job may start, by its budget: what is settled before and around the run.

Promises: a job that its budget does not let start is refused before a worker starts and before the
ledger says anything of it; a part of a shared budget is given back however the run ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from ebbtide.platform import budget
from ebbtide.platform.account import account
from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import BudgetError
from ebbtide.platform.ledger import read_ledger
from ebbtide.platform.nodes import LABEL_INSTANCE_TYPE
from ebbtide.platform.price_feed import PriceFeed
from ebbtide.platform.shared_budget import SharedAccount
from ebbtide.platform.storage import Storage, open_storage
from ebbtide.train.bookkeeping import Bookkeeping, ClusterNode, describe, terms
from ebbtide.train.config import TrainConfig
from ebbtide.train.events import Event
from ebbtide.train.spending import START_S, Before, Guard, before, unpriced_text


def resources(config: TrainConfig) -> dict[str, float]:
    """What Ray reserves for one worker."""
    workers = config.workers
    wanted: dict[str, Any] = {"CPU": workers.cpus, "GPU": workers.gpus, **workers.resources}
    return {name: amount for name, amount in wanted.items() if amount}


def earlier(run: Storage, events: Sequence[Event], now_s: float) -> Before:
    """What earlier drivers of the run have spent."""
    if not events:
        return Before(now_s)
    return before(account(read_ledger(run).records, now_s), events[0].time_s)


def admit(config: TrainConfig, guard: Guard, spent: Before, now_s: float) -> None:
    """Raise BudgetError if the job's budget lets nothing run, or does not pay for a start."""
    if reason := budget.refusal(config.budget, now_s):
        raise BudgetError(f"{config.run_uri}: not started: {reason}")
    books = guard.books(now_s, Decimal(0), spent.usd_per_hour)
    act = guard.decide(replace(books, save_s=START_S))
    if act.end:
        raise BudgetError(
            f"{config.run_uri}: not started: {act.reason}. The run is saved at step "
            f"{guard.saved_step} of {config.steps}; change the job's budget to go on from there"
        )


@contextlib.contextmanager
def share(config: TrainConfig, earlier: Before, books: Bookkeeping, clock: Clock) -> Iterator[None]:
    """The run's part of a shared budget, reserved while it runs; then what it has spent."""
    shared, limit = config.budget.shared, config.budget.max_dollars_per_run
    if shared is None or limit is None:
        yield
        return
    pool = SharedAccount(open_storage(shared.uri))
    pool.reserve(config.run_uri, limit, shared.max_dollars, clock.time())
    try:
        yield
    finally:
        now_s = clock.time()
        pool.settle(config.run_uri, earlier.usd + books.usd(now_s), now_s)


def require_prices(config: TrainConfig, feed: PriceFeed) -> None:
    """Raise BudgetError if the job has a budget and could be placed on a node without a price.

    The live prices of what the cluster has are known afterwards.
    """
    import ray

    wanted = resources(config)
    nodes = [
        ClusterNode(node["NodeID"], node.get("Labels") or {})
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(n, 0) >= wanted[n] for n in wanted)
    ]
    kinds = {node.labels.get(LABEL_INSTANCE_TYPE, config.cost.instance_type) for node in nodes}
    feed.learn([kind for kind in kinds if kind])
    for node in nodes if config.budget.needs_prices else ():
        up = terms(node, 0.0, config.cost, feed)
        if up.usd_per_hour is None:
            why = unpriced_text(describe(up))
            raise BudgetError(f"{config.run_uri}: not started: {why}")
