from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbtide.platform.errors import BudgetError, StorageError
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.shared_budget import Entry, SharedAccount, fits, parts
from ebbtide.platform.storage import LocalStorage, Storage, open_storage


def admitted(storage: Storage, runs: int, usd: Decimal, max_dollars: Decimal) -> int:
    """How many of so many runs get in, all at once, each with an account object of its own."""

    def ask(number: int) -> bool:
        try:
            SharedAccount(storage).reserve(f"run-{number}", usd, max_dollars, 0.0)
        except BudgetError:
            return False
        return True

    with ThreadPoolExecutor(runs) as pool:
        return sum(pool.map(ask, range(runs)))


def test_of_runs_that_ask_at_once_only_those_that_fit_are_admitted(
    tmp_path: Path, s3_server: LocalS3
) -> None:
    s3 = open_storage(f"s3://{s3_server.bucket}/budgets/team")
    for storage in (LocalStorage(tmp_path), s3):
        assert admitted(storage, 12, Decimal(3), Decimal(10)) == 3
        entries = SharedAccount(storage).entries()
        assert sum(part.usd for part in parts(entries).values()) == 9


def test_a_run_that_ends_leaves_what_it_has_not_spent_to_the_next(tmp_path: Path) -> None:
    account = SharedAccount(LocalStorage(tmp_path))
    account.reserve("a", Decimal(6), Decimal(10), 0.0)
    with pytest.raises(BudgetError, match=r"\$6.0000 of the shared \$10.00 are taken by 1 other"):
        account.reserve("b", Decimal(5), Decimal(10), 0.0)
    account.reserve("a", Decimal(7), Decimal(10), 0.0)  # the same run again, after a kill
    account.settle("a", Decimal("1.5"), 1.0)
    account.reserve("b", Decimal(5), Decimal(10), 2.0)
    with pytest.raises(BudgetError):
        account.reserve("a", Decimal(6), Decimal(10), 3.0)


def test_an_entry_that_cannot_be_read_stops_admission(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("00000000.json", b"{}")
    with pytest.raises(StorageError, match="00000000.json is no entry of a shared budget"):
        SharedAccount(storage).reserve("a", Decimal(1), Decimal(10), 0.0)


ENTRIES = st.lists(
    st.builds(
        Entry,
        run=st.sampled_from("abc"),
        kind=st.sampled_from(("reserved", "spent")),
        usd=st.decimals(0, 10, places=2),
        time_s=st.just(0.0),
    )
)


@given(ENTRIES, st.sampled_from("abcd"), st.decimals(0, 10, places=2))
def test_what_fits_is_within_the_sum(entries: list[Entry], run: str, usd: Decimal) -> None:
    taken = fits(entries, run, usd, Decimal(15))
    after = parts([*entries, Entry(run=run, kind="reserved", usd=usd, time_s=0.0)])
    total = sum(part.usd for part in after.values())
    assert taken == (total if total <= 15 else None)
