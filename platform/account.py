"""What a run cost, and why: the division of its node time, priced.

Pure. Promises: the owners sum to the node-seconds exactly, and their dollars to the total exactly
(Decimal; nothing is rounded before it is shown). The price of every second is the one that was
recorded with the node. Seconds without a price make a total *partial*; a total without any known
price is None, never 0. Formulas: dollars = node-seconds / 3600 x dollars per hour;
goodput = compute of kept steps / node-seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from typing import Literal, TypeVar

from ebbtide.platform import timeline
from ebbtide.platform.meter import Owner
from ebbtide.platform.records import (
    Finished,
    NodeUp,
    Record,
    SaveMissed,
    Served,
    Started,
    Transfer,
    TrialEnded,
)

_US_PER_HOUR = 3_600_000_000
K = TypeVar("K", bound=Hashable)


def usd_text(usd: Decimal, of: Decimal | None = None) -> str:
    """Dollars for a person: cents, or more places beside a total ``of`` that is small."""
    size = abs(usd if of is None else of)
    places = 2 if size >= 10 else 4 if size >= Decimal("0.1") or not size else 6
    return f"${usd.quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP):,}"


@dataclass(frozen=True)
class Dollars:
    """Dollars of some node time, of which a part may have no known price.

    Kept as microseconds x dollars per hour, which is exact; the division by an hour comes last.
    """

    priced: Decimal = Decimal(0)
    priced_us: int = 0
    unpriced_us: int = 0

    @classmethod
    def of(cls, time_us: int, usd_per_hour: Decimal | None) -> Dollars:
        if usd_per_hour is None:
            return cls(unpriced_us=time_us)
        return cls(time_us * usd_per_hour, time_us)

    def __add__(self, other: Dollars) -> Dollars:
        return Dollars(
            self.priced + other.priced,
            self.priced_us + other.priced_us,
            self.unpriced_us + other.unpriced_us,
        )

    @property
    def usd(self) -> Decimal | None:
        """Dollars of the part with a known price; None if there is time, but none with a price."""
        if self.unpriced_us and not self.priced_us:
            return None
        return self.priced / _US_PER_HOUR

    @property
    def partial(self) -> bool:
        """Whether some of the time has no known price."""
        return self.unpriced_us > 0

    def text(self, of: Dollars | None = None) -> str:
        """For a person; with as many places as fit the total ``of``."""
        if self.usd is None:
            return "unknown"
        return usd_text(self.usd, (of or self).usd) + (" (partial)" if self.partial else "")


@dataclass(frozen=True)
class Total:
    """Node time and what it cost; beside it, what it would have cost on demand."""

    time_us: int = 0
    spent: Dollars = Dollars()
    on_demand: Dollars = Dollars()

    def __add__(self, other: Total) -> Total:
        return Total(
            self.time_us + other.time_us,
            self.spent + other.spent,
            self.on_demand + other.on_demand,
        )

    @property
    def seconds(self) -> float:
        """Node-seconds."""
        return self.time_us / 1_000_000


@dataclass(frozen=True)
class Row:
    """The part of a node's time that one owner had in one attempt and epoch."""

    node: NodeUp
    attempt: int | None
    owner: Owner
    epoch: int | None
    total: Total


@dataclass(frozen=True)
class Account:
    """A run's account at one moment.

    ``status`` is what the driver wrote when it finished, ``running``, or ``lost`` where a run has
    not finished and given no sign of life for a minute (up to which it is accounted). ``transfers``
    cost beside the node time: bytes / 10^9 x dollars per GB.
    ``saves_missed`` counts checkpoints that came to nothing, by why: left out, failed. ``trials``
    are those of a sweep, by their number, ``served`` what each key of an endpoint had, by name.
    """

    rows: tuple[Row, ...]
    status: str | Literal["running", "lost"]
    saves_missed: Mapping[str, int] = field(default_factory=dict)
    transfers: frozenset[Transfer] = frozenset()
    trials: tuple[TrialEnded, ...] = ()
    served: Mapping[str, Served] = field(default_factory=dict)

    @property
    def served_tokens(self) -> int:
        """Of prompts and answers, of all keys."""
        return sum(each.tokens for each in self.served.values())

    @property
    def startup_saved_s(self) -> float:
        """Seconds of start-up that a sweep's trials did not have, as they ran on a warm pool."""
        return sum(trial.saved_s for trial in self.trials)

    @property
    def total(self) -> Total:
        return sum((row.total for row in self.rows), Total())

    @property
    def egress_bytes(self) -> int:
        """Bytes that left the nodes' network and were paid for."""
        return sum(each.size_bytes for each in self.transfers)

    @property
    def egress_usd(self) -> Decimal:
        """What they cost; exact."""
        parts = (each.size_bytes * each.usd_per_gb for each in self.transfers)
        return sum(parts, Decimal(0)) / 10**9

    def by(self, key: Callable[[Row], K]) -> dict[K, Total]:
        """Totals by any key of the rows, such as ``lambda row: row.node.market``."""
        totals: dict[K, Total] = defaultdict(Total)
        for row in self.rows:
            totals[key(row)] += row.total
        return dict(totals)

    @property
    def by_owner(self) -> dict[Owner, Total]:
        """Every owner, in the order of its declaration."""
        found = self.by(lambda row: row.owner)
        return {owner: found.get(owner, Total()) for owner in Owner}

    @property
    def by_attempt(self) -> dict[int | None, Total]:
        """By attempt in order; None is node time before there was any attempt."""
        return _in_order(self.by(lambda row: row.attempt))

    @property
    def by_epoch(self) -> dict[int | None, Total]:
        """By epoch (0-based) in order; None where the ledger does not say."""
        return _in_order(self.by(lambda row: row.epoch))

    @property
    def without_stalls(self) -> Total:
        """What the run would have cost if its nodes had only computed (and validated)."""
        return self.by_owner[Owner.COMPUTE] + self.by_owner[Owner.VALIDATION]

    @property
    def goodput(self) -> float | None:
        """Compute of kept steps over node-seconds; None without node time."""
        total_us = self.total.time_us
        return self.by_owner[Owner.COMPUTE].time_us / total_us if total_us else None


def _in_order(found: dict[int | None, Total]) -> dict[int | None, Total]:
    return {n: found[n] for n in sorted(found, key=lambda n: -1 if n is None else n)}


def account(records: Sequence[Record], now_s: float) -> Account:
    """The account of a run from its ledger's records in any order, at ``now_s`` (epoch s)."""
    shares = timeline.divide(records, now_s)
    rows = [
        Row(
            share.terms,
            share.attempt,
            share.owner,
            share.epoch,
            Total(
                time_us,
                Dollars.of(time_us, share.terms.usd_per_hour),
                Dollars.of(time_us, share.terms.usd_per_hour_on_demand),
            ),
        )
        for share, time_us in shares.items()
    ]
    rows.sort(
        key=lambda row: (
            *(row.node.time_s, row.node.node_id, row.attempt or 0, row.owner),
            *(-1 if row.epoch is None else row.epoch,),
        )
    )
    missed = Counter(record.why for record in records if isinstance(record, SaveMissed))
    transfers = frozenset(record for record in records if isinstance(record, Transfer))
    status, trials = _status(records, now_s), _trials(records)
    return Account(tuple(rows), status, dict(missed), transfers, trials, _served(records))


def _served(records: Sequence[Record]) -> dict[str, Served]:
    """By key, in the order of names."""
    found: dict[str, Served] = {}
    for record in records:
        if isinstance(record, Served):
            before = found.get(record.key)
            found[record.key] = record if before is None else before + record
    return dict(sorted(found.items()))


def _trials(records: Sequence[Record]) -> tuple[TrialEnded, ...]:
    """Each once, as it ended last."""
    ended = sorted(
        (record for record in records if isinstance(record, TrialEnded)),
        key=lambda record: (record.number, record.time_s, record.model_dump_json()),
    )
    return tuple({record.number: record for record in ended}.values())


def _status(records: Sequence[Record], now_s: float) -> str:
    finished = max(
        (record for record in records if isinstance(record, Finished)),
        key=lambda record: record.time_s,
        default=None,
    )
    taken_up_s = max((r.time_s for r in records if isinstance(r, Started | NodeUp)), default=0.0)
    if finished is not None and finished.time_s >= taken_up_s:
        return finished.status
    silent = now_s - timeline.newest_s(records) > timeline.SILENCE_S
    return "lost" if silent else "running"
