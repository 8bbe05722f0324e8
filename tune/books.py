"""A sweep's own part of the ledger: its seats as nodes, what they did, and what each trial cost.

A seat pays for the part of a node that it reserves, and has that part's price. Promises: the sum
over the seats is what ``max_dollars`` is held against; a driver that is killed leaves all but the
last seconds on storage.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import TracebackType

from ebbtide.platform.clock import Clock
from ebbtide.platform.ledger import (
    Attempt,
    Finished,
    LedgerWriter,
    NodeDown,
    NodeUp,
    Owner,
    Span,
    Started,
    TrialEnded,
)
from ebbtide.platform.storage import Storage

Terms = Mapping[str, NodeUp]
"""By seat: what its part of a node is, and costs."""


class Books:
    """One driver's. A context manager; ``attempt`` numbers the drivers of the sweep from 1."""

    def __init__(self, storage: Storage, clock: Clock, attempt: int) -> None:
        self._clock, self._attempt = clock, attempt
        self._writer = LedgerWriter(storage, clock, name="sweep")
        self._held: dict[str, NodeUp] = {}
        self.status = "interrupted"

    def __enter__(self) -> Books:
        now_s = self._clock.time()
        self._writer.write(Started(time_s=now_s))
        self._writer.write(Attempt(index=self._attempt, start_s=now_s, first_step=0))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.hold({})
        self._writer.write(Finished(time_s=self._clock.time(), status=self.status))
        self._writer.close()

    def hold(self, seats: Terms) -> None:
        """The seats that the sweep holds, from now on."""
        now_s = self._clock.time()
        for seat in self._held.keys() - seats.keys():
            self._writer.write(NodeDown(node_id=self._held.pop(seat).node_id, time_s=now_s))
        for seat, terms in seats.items():
            if seat not in self._held:
                node_id = f"{terms.node_id[:12]}/{seat}"
                up = terms.model_copy(update={"node_id": node_id, "time_s": now_s})
                self._held[seat] = up
                self._writer.write(up)

    def ran(self, seat: str, seconds: float) -> None:
        """A trial has just been on a seat for so long."""
        held = self._held.get(seat)
        if held is None:
            return
        end_s = self._clock.time()
        start_s = max(held.time_s, end_s - seconds)
        self._writer.write(
            Span(
                node_id=held.node_id,
                attempt=self._attempt,
                start_s=start_s,
                end_s=end_s,
                seconds={Owner.COMPUTE: end_s - start_s},
            )
        )

    def ended(
        self, number: int, status: str, seconds: float, usd: Decimal | None, saved_s: float
    ) -> None:
        """A trial has ended; ``saved_s`` of start-up were not needed."""
        self._writer.write(
            TrialEnded(
                time_s=self._clock.time(),
                number=number,
                status=status,
                seconds=seconds,
                usd=usd,
                saved_s=saved_s,
            )
        )
