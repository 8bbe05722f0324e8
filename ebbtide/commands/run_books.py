"""What ``cost`` and ``report`` share: the run that is asked for, and its figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from ebbtide.platform.account import Account, Dollars, usd_text
from ebbtide.platform.errors import CostError
from ebbtide.platform.ledger import Ledger, LedgerFault, read_ledger
from ebbtide.platform.storage import Storage
from ebbtide.train.events import Event, read_events
from ebbtide.train.history import History

_LEDGER = "/ledger/"


@dataclass(frozen=True)
class Figures:
    """A run's cost against what else it could have been; None where it is not known.

    ``tokens`` are those of kept steps; ``stalls`` is what was spent on anything but compute and
    validation.
    """

    tokens: int
    usd_per_million_tokens: Decimal | None
    usd_per_epoch: Decimal | None
    saved_usd: Decimal | None
    stalls: Dollars


def figures(result: Account, tokens: int) -> Figures:
    """The figures of an account."""
    total, ideal = result.total, result.without_stalls
    spent, on_demand = total.spent.usd, total.on_demand.usd
    stalls = Dollars(
        total.spent.priced - ideal.spent.priced,
        total.spent.priced_us - ideal.spent.priced_us,
        total.spent.unpriced_us - ideal.spent.unpriced_us,
    )
    epochs = [part for epoch, part in result.by_epoch.items() if epoch is not None]
    known = not (total.spent.partial or total.on_demand.partial)
    return Figures(
        tokens=tokens,
        usd_per_million_tokens=None if spent is None or not tokens else spent * 10**6 / tokens,
        usd_per_epoch=None if spent is None or not epochs else spent / len(epochs),
        saved_usd=on_demand - spent if known and None not in (spent, on_demand) else None,  # type: ignore[operator]
        stalls=stalls,
    )


def lines(result: Account, tokens: int) -> Iterator[str]:
    """The figures for a person, one a line."""
    found, total = figures(result, tokens), result.total.spent
    if found.usd_per_million_tokens is not None:
        part = " (partial)" if total.partial else ""
        of = "prompts and answers" if result.served else "kept steps"
        yield (
            f"{usd_text(found.usd_per_million_tokens)} per 1M tokens{part}, over the {tokens:,} of "
            f"{of}"
        )
    if result.transfers:
        size, usd = result.egress_bytes / 1e9, usd_text(result.egress_usd)
        yield f"{usd} beside that for {size:,.3f} GB of egress"
    if result.goodput is not None and not total.partial:
        yield (
            f"without any stall it would have been {result.without_stalls.spent.text(total)}: "
            f"{found.stalls.text(total)} less"
        )


def ledger_of(source: Storage) -> Ledger:
    """The ledger of a run. Raises CostError if there is none, or nothing of it can be read."""
    ledger = read_ledger(source)
    if not ledger.records:
        raise CostError(_unreadable(source.uri, ledger.faults))
    return ledger


def events_of(source: Storage) -> tuple[list[Event], History]:
    """What happened in a training run; nothing, for what was no training run."""
    events = read_events(source)
    return events, History(events)


def tokens_of(history: History, result: Account) -> int:
    """The tokens of the kept steps; of an endpoint, those of prompts and answers."""
    return history.tokens or result.served_tokens


def runs_under(storage: Storage) -> list[str]:
    """The names of all runs with a ledger under a storage, sorted."""
    keys = (info.key for info in storage.list())
    return sorted({key.rpartition(_LEDGER)[0] for key in keys if _LEDGER in key})


def _unreadable(run_uri: str, faults: tuple[LedgerFault, ...]) -> str:
    text = f"{run_uri}: no line of the ledger could be read"
    if faults:
        first = faults[0]
        text += f"; the first is ledger/{first.key}, line {first.line}: {first.reason}"
    return f"{text}; restore the ledger, or ask for another run"
