"""A sum of money that many runs draw from, on storage: who may start, decided without a server.

Promises: of runs that ask at once, only those whose limits fit together are admitted, on whatever
machines they are asked for. The account is a log: entry ``n`` is put only if it is not there yet,
so two who saw the same balance cannot both write the next one, and the slower looks again.

A run reserves its whole limit when it starts, and when it ends what it has spent. A driver that was
killed leaves its reservation, until the same run is submitted again.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ebbtide.platform.account import usd_text
from ebbtide.platform.errors import AlreadyExists, BudgetError, StorageError
from ebbtide.platform.storage import Storage


class Entry(BaseModel):
    """From now on the run's part of the sum is ``usd``: reserved while it runs, then spent."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: str
    kind: Literal["reserved", "spent"]
    usd: Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]
    time_s: float


def parts(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Each run's newest entry; ``entries`` in order."""
    return {entry.run: entry for entry in entries}


def fits(entries: Iterable[Entry], run: str, usd: Decimal, max_dollars: Decimal) -> Decimal | None:
    """What would be taken of the sum by all, if the run may have ``usd``; None if it may not."""
    others = sum((e.usd for e in parts(entries).values() if e.run != run), Decimal(0))
    return others + usd if others + usd <= max_dollars else None


class SharedAccount:
    """The account of a shared budget at its storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def reserve(self, run: str, usd: Decimal, max_dollars: Decimal, now_s: float) -> None:
        """Admit a run with its limit. Raises BudgetError if it does not fit beside the others."""
        while True:
            entries = self.entries()
            if fits(entries, run, usd, max_dollars) is None:
                taken = parts(entries)
                others = sum((e.usd for e in taken.values() if e.run != run), Decimal(0))
                raise BudgetError(
                    f"{self._storage.uri}: this run may cost {usd_text(usd)} (budget."
                    f"max_dollars_per_run), and {usd_text(others)} of the shared "
                    f"{usd_text(max_dollars)} are taken by {len(taken.keys() - {run})} other runs; "
                    "wait for one to end, or lower the limit"
                )
            if self._append(len(entries), Entry(run=run, kind="reserved", usd=usd, time_s=now_s)):
                return

    def settle(self, run: str, usd: Decimal, now_s: float) -> None:
        """The run has ended and has cost that much since its first start."""
        entry = Entry(run=run, kind="spent", usd=usd, time_s=now_s)
        while not self._append(len(self.entries()), entry):
            pass

    def entries(self) -> list[Entry]:
        """Every entry, oldest first. Raises StorageError if one cannot be read."""
        found = []
        for info in self._storage.list():
            if info.key.endswith(".json"):
                try:
                    found.append(Entry.model_validate_json(self._storage.get(info.key)))
                except ValidationError as error:
                    raise StorageError(
                        f"{self._storage.uri}/{info.key} is no entry of a shared budget; "
                        "restore it, or name another place (budget.shared.uri)"
                    ) from error
        return found

    def _append(self, number: int, entry: Entry) -> bool:
        try:
            line = entry.model_dump_json().encode()
            self._storage.put(f"{number:08d}.json", line, if_absent=True)
        except AlreadyExists:
            return False
        return True
