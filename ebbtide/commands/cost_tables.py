"""The tables of ``ebbtide cost``."""

from __future__ import annotations

from decimal import Decimal

from rich import box
from rich.table import Table

from ebbtide.platform.account import Account, Total, usd_text
from ebbtide.platform.meter import Owner
from ebbtide.platform.records import NodeUp, Served

_SHOWN = 20


def percent(part: Total, whole: Total) -> float:
    """Of the node time."""
    return 100 * part.time_us / whole.time_us if whole.time_us else 0.0


def table(title: str, *columns: str) -> Table:
    """A table with its first column to the left."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        shown.add_column(column, justify="right" if number else "left", no_wrap=not number)
    return shown


def cells(part: Total, whole: Total) -> list[str]:
    """Seconds, percent, cost and cost on demand."""
    return [
        f"{part.seconds:,.1f}",
        f"{percent(part, whole):.1f}",
        part.spent.text(whole.spent),
        part.on_demand.text(whole.on_demand),
    ]


COLUMNS = ("seconds", "%", "cost", "on demand")


def owners(run_uri: str, result: Account) -> Table:
    """By owner, with the total."""
    shown = table(f"{run_uri} ({result.status})", "owner", *COLUMNS)
    for owner, part in result.by_owner.items():
        shown.add_row(owner.value.replace("_", " "), *cells(part, result.total))
    shown.add_section()
    shown.add_row("total", *cells(result.total, result.total), style="bold")
    return shown


def attempts(result: Account) -> Table:
    """By attempt."""
    by_both = result.by(lambda row: (row.attempt, row.owner))
    shown = table("By attempt", "attempt", *COLUMNS, "compute %", "lost %")
    for number, part in result.by_attempt.items():
        shares = (
            f"{percent(by_both.get((number, owner), Total()), part):.1f}"
            for owner in (Owner.COMPUTE, Owner.LOST_WORK)
        )
        name = "before any" if number is None else str(number)
        shown.add_row(name, *cells(part, result.total), *shares)
    return shown


def epochs(result: Account) -> list[Table]:
    """By epoch; none if the ledger names no epochs."""
    if not any(epoch is not None for epoch in result.by_epoch):
        return []
    shown = table("By epoch", "epoch", *COLUMNS)
    for epoch, part in result.by_epoch.items():
        shown.add_row("unknown" if epoch is None else str(epoch), *cells(part, result.total))
    return [shown]


def trials(result: Account) -> list[Table]:
    """Of a sweep: its dearest trials, by number."""
    if not result.trials:
        return []
    dearest = sorted(result.trials, key=lambda trial: (trial.usd or 0, trial.seconds))[-_SHOWN:]
    left_out = len(result.trials) - len(dearest)
    title = f"By trial ({left_out} cheaper ones are left out)" if left_out else "By trial"
    shown = table(title, "trial", "seconds", "cost", "status")
    for trial in sorted(dearest, key=lambda trial: trial.number):
        cost = "unknown" if trial.usd is None else usd_text(trial.usd, result.total.spent.usd)
        shown.add_row(str(trial.number), f"{trial.seconds:,.1f}", cost, trial.status)
    return [shown]


def shares(result: Account) -> list[tuple[Served, Decimal | None]]:
    """What each key of an endpoint had, and its part of the cost: that of its tokens in all."""
    usd, tokens = result.total.spent.usd, result.served_tokens
    return [
        (each, None if usd is None or not tokens else usd * each.tokens / tokens)
        for each in result.served.values()
    ]


def keys(result: Account) -> list[Table]:
    """Of an endpoint: what each key had; none of a run. Seconds are means of its requests."""
    if not result.served:
        return []
    columns = ("requests", "prompt", "output", "cost")
    stages = ("queue", "prefill", "transfer", "decode")
    shown = table("By key: tokens, mean seconds", "key", *columns, *stages)
    for each, usd in shares(result):
        cost = "unknown" if usd is None else usd_text(usd, result.total.spent.usd)
        seconds = (each.queue_s, each.prefill_s, each.transfer_s, each.decode_s)
        counts = (each.requests, each.prompt_tokens, each.output_tokens)
        means = (f"{amount / max(1, each.requests):.3f}" for amount in seconds)
        shown.add_row(each.key, *(f"{count:,}" for count in counts), cost, *means)
    return [shown]


def nodes(result: Account) -> Table:
    """By instance type, market and price."""

    def kind(node: NodeUp) -> tuple[str, str, str]:
        price = node.usd_per_hour
        hourly = "unknown" if price is None else f"{price.normalize():f}"
        return node.instance_type or "unknown", node.market.value.replace("_", " "), hourly

    nodes: dict[tuple[str, str, str], set[str]] = {}
    for row in result.rows:
        nodes.setdefault(kind(row.node), set()).add(row.node.node_id)
    shown = table("By instance type", "type", "market", "$/hour", "nodes", *COLUMNS[:-1])
    for key, part in result.by(lambda row: kind(row.node)).items():
        shown.add_row(*key, str(len(nodes[key])), *cells(part, result.total)[:-1])
    return shown


def summary(result: Account) -> list[str]:
    """What the totals mean, one a line."""
    total = result.total
    lines = []
    if result.goodput is not None:
        what = "with requests at work" if result.served else "compute of kept steps"
        lines.append(f"goodput {100 * result.goodput:.1f}% of node time ({what})")
    if result.trials:
        lines.append(
            f"{len(result.trials)} trials; the pool saved {result.startup_saved_s:,.0f} s of their "
            "start-up"
        )
    if result.saves_missed:
        counts = ", ".join(f"{count} {why}" for why, count in sorted(result.saves_missed.items()))
        lines.append(f"checkpoints that came to nothing: {counts}")
    spent, on_demand = total.spent.usd, total.on_demand.usd
    if total.spent.partial:
        lines.append(
            f"the total is partial: {total.spent.unpriced_us / 1e6:,.1f} node-seconds have no known"
            " price; put their instance type into the catalogue (cost.catalogue) for the next run"
        )
    elif spent is not None and on_demand not in (None, spent) and not total.on_demand.partial:
        saved = on_demand - spent
        word = "less" if saved >= 0 else "more"
        lines.append(
            f"{usd_text(spent, on_demand)} spent, {usd_text(abs(saved), on_demand)} "
            f"({abs(saved) / on_demand:.0%}) {word} than the same node time on demand"
        )
    return lines
